package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// arches are the architectures of a release, as Go and Debian call them.
var arches = []string{"amd64", "arm64"}

type options struct {
	version string // without a leading v
	source  string // of the main module
	out     string
}

type release struct {
	options
	time  time.Time // of all files
	stage string    // what is built before it is packed
}

// versions are those of semantic versioning without build metadata, which packages would have to leave out.
var versions = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z]+(\.[0-9A-Za-z]+)*)?$`)

// newRelease checks that the sources are fit for a release, and clears the directory of the output. The caller
// must call close.
func newRelease(o options) (*release, error) {
	if !versions.MatchString(o.version) {
		return nil, fmt.Errorf("version %q: expected one such as 1.2.3 or 1.2.3-rc.1", o.version)
	}
	r := &release{options: o}
	var err error
	if r.time, err = r.commitTime(); err != nil {
		return nil, err
	}
	if !r.isPreview() {
		if err := r.checkClean(); err != nil {
			return nil, err
		}
	}
	if r.out, err = filepath.Abs(o.out); err != nil {
		return nil, err
	}
	if err := errors.Join(os.RemoveAll(r.out), os.MkdirAll(r.out, 0o755)); err != nil {
		return nil, err
	}
	r.stage, err = os.MkdirTemp("", "ebpfnet-release-")
	return r, err
}

func (r *release) close() { _ = os.RemoveAll(r.stage) }

// isPreview reports whether this is a preview. Its sources may be uncommitted, and its notes are those of the
// next release.
func (r *release) isPreview() bool { return strings.Contains(r.version, "-") }

// commitTime returns the time of all files: SOURCE_DATE_EPOCH, or that of the commit.
func (r *release) commitTime() (time.Time, error) {
	text := os.Getenv("SOURCE_DATE_EPOCH")
	if text == "" {
		var err error
		if text, err = r.git("log", "-1", "--format=%ct"); err != nil {
			return time.Time{}, err
		}
	}
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: expected seconds since 1970: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// checkClean fails if the files are not those of the commit.
func (r *release) checkClean() error {
	changes, err := r.git("status", "--porcelain")
	if err == nil && changes != "" {
		err = errors.New("version " + r.version + " is a final one: commit these first, or build a preview such as " + r.version + "-rc.1:\n" + changes)
	}
	return err
}

func (r *release) git(args ...string) (string, error) {
	return r.output("git", append([]string{"-c", "safe.directory=*"}, args...)...)
}

// output runs a command in the sources and returns what it prints.
func (r *release) output(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = r.source
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// staged returns the path of a file that is built before it is packed.
func (r *release) staged(name ...string) string {
	return filepath.Join(append([]string{r.stage}, name...)...)
}

// writeStaged writes such a file.
func (r *release) writeStaged(name string, content []byte) error {
	file := r.staged(name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, content, 0o644)
}
