package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// archiveKeyring verifies Debian suites. It comes from the package debian-archive-keyring.
const archiveKeyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// aptRepo is a Debian suite that apt reads with its own sources, lists and caches: the machine's apt
// state neither matters nor changes. The rest of the machine's apt configuration, such as a proxy,
// applies.
type aptRepo struct {
	dir    string
	config string
}

// newAptRepo prepares dir, which must be empty, and fetches the suite's lists.
func newAptRepo(ctx context.Context, dir, suite, arch string) (*aptRepo, error) {
	mirror, err := debianMirror(ctx, strings.HasSuffix(suite, "-security"))
	if err != nil {
		return nil, fmt.Errorf("find the machine's Debian mirror: %w", err)
	}
	repo := &aptRepo{dir: dir, config: filepath.Join(dir, "apt.conf")}
	if err := repo.writeConfig(mirror, suite, arch); err != nil {
		return nil, fmt.Errorf("write apt configuration: %w", err)
	}
	if _, err := repo.apt(ctx, "apt-get", "update", "--error-on=any"); err != nil {
		return nil, err
	}
	return repo, nil
}

func (r *aptRepo) writeConfig(mirror, suite, arch string) error {
	for _, sub := range []string{"state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(r.dir, sub), 0o755); err != nil {
			return err
		}
	}
	source := fmt.Sprintf("deb [arch=%s target=Packages signed-by=%s] %s %s main\n", arch, archiveKeyring, mirror, suite)
	// The Release file of an archived suite has expired for good. The cleared hooks could change the
	// machine's caches.
	config := fmt.Sprintf(`Dir::Etc::SourceList "%[1]s/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State "%[1]s/state";
Dir::State::Lists "%[1]s/state/lists";
Dir::State::Status "%[1]s/status";
Dir::Cache "%[1]s/cache";
APT::Architecture "%[2]s";
APT::Architectures "%[2]s";
APT::Sandbox::User "";
Acquire::Check-Valid-Until "false";
Acquire::Retries "3";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
`, r.dir, arch)
	return errors.Join(
		os.WriteFile(filepath.Join(r.dir, "status"), nil, 0o644),
		os.WriteFile(filepath.Join(r.dir, "sources.list"), []byte(source), 0o600),
		os.WriteFile(r.config, []byte(config), 0o644),
	)
}

// packageNames lists the suite's packages whose name starts with prefix.
func (r *aptRepo) packageNames(ctx context.Context, prefix string) ([]string, error) {
	out, err := r.apt(ctx, "apt-cache", "pkgnames", prefix)
	if err != nil {
		return nil, err
	}
	names := strings.Fields(out)
	slices.Sort(names)
	return names, nil
}

// download fetches the packages and returns the paths of their files.
func (r *aptRepo) download(ctx context.Context, packages ...string) ([]string, error) {
	if _, err := r.apt(ctx, "apt-get", append([]string{"download"}, packages...)...); err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(r.dir, "*.deb"))
	if err == nil && len(files) != len(packages) {
		err = fmt.Errorf("apt-get download of %q made %q", packages, files)
	}
	return files, err
}

func (r *aptRepo) apt(ctx context.Context, tool string, args ...string) (string, error) {
	return output(ctx, r.dir, tool, append([]string{"-qq", "-c", r.config}, args...)...)
}

// debianMirror derives the mirror of Debian, or of its security updates, from the apt sources of this
// machine, which must run Debian.
func debianMirror(ctx context.Context, security bool) (string, error) {
	release, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	codename := regexp.MustCompile(`(?m)^VERSION_CODENAME="?([a-z]+)"?$`).FindSubmatch(release)
	if codename == nil {
		return "", errors.New("/etc/os-release has no VERSION_CODENAME")
	}
	suite := string(codename[1])
	if security {
		suite += "-security"
	}
	uris, err := output(ctx, "/", "apt-get", "update", "--print-uris")
	if err != nil {
		return "", err
	}
	return mirrorOf(uris, suite)
}

// mirrorOf finds the base address of a suite in the output of apt-get update --print-uris: lines such
// as 'BASE/dists/SUITE/InRelease' name size.
func mirrorOf(uris, suite string) (string, error) {
	line := regexp.MustCompile(`(?m)^'(\S+)/dists/` + regexp.QuoteMeta(suite) + `/InRelease'`)
	match := line.FindStringSubmatch(uris)
	if match == nil {
		return "", fmt.Errorf("apt's sources have no suite %s", suite)
	}
	return match[1], nil
}

// output runs a command in dir and returns its standard output. The error includes the standard error.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("run %s: %w: %s", cmd, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
