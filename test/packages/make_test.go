package packages

import (
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const repository = "../.."

// TestMake wants `make install` to install what the package has, in the directories of those who build it themselves,
// and `make uninstall` to leave nothing.
func TestMake(t *testing.T) {
	h := newHost(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	var want []string
	for _, line := range strings.Fields(h.run(t, []string{"dpkg-query", "-L", "ebpfnet"})) {
		if info, err := os.Stat(h.root + line); err != nil || info.IsDir() {
			continue
		}
		file, isManual := strings.CutSuffix(line, ".gz")
		isPart := slices.ContainsFunc([]string{"/bash-completion/", "/fish/", "/zsh/", "/rules.d/", "/dispatcher.d/", "/routable.d/", "/usr/lib/cni/", "/usr/sbin/"},
			func(dir string) bool { return strings.Contains(file, dir) })
		if isPart || isManual && strings.Contains(file, "/man8/") {
			want = append(want, strings.NewReplacer("/usr/lib/cni", "/opt/cni/bin", "/usr/lib", "/etc", "/usr/share", "/usr/local/share",
				"/usr/sbin", "/usr/local/sbin", "vendor-completions", "site-functions").Replace(file))
		}
	}
	slices.Sort(want)
	dest := t.TempDir()
	h.make(t, "install", "DESTDIR="+dest)
	if got := filesBelow(t, dest); len(got) < 10 || !slices.Equal(got, want) {
		t.Errorf("make install: got %q, want %q", got, want)
	}
	h.make(t, "uninstall", "DESTDIR="+dest)
	if got := filesBelow(t, dest); len(got) > 0 {
		t.Errorf("make uninstall: left %q", got)
	}
}

// TestMakeUninstallWhileUsed refuses, because a runtime could not remove its containers afterwards.
func TestMakeUninstallWhileUsed(t *testing.T) {
	h := newHost(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	dir := t.TempDir()
	directories := []string{"PREFIX=" + dir, "SBIN=" + dir, "HOOKS=" + dir, "SHARE=" + dir}
	h.make(t, append([]string{"install"}, directories...)...)
	before := filesBelow(t, dir)
	pod := h.runtime(t, pluginsOfDebian).AddPod(t, "web", nil)
	output, err := h.tryMake(t, append([]string{"uninstall"}, directories...)...)
	if err == nil {
		t.Error("make uninstall: got success, want a failure")
	}
	wantWords(t, []string{"make", "uninstall"}, output, []string{"stop the containers first", "pods web eth0"})
	if after := filesBelow(t, dir); !slices.Equal(before, after) {
		t.Errorf("make uninstall: %q are left of %q", after, before)
	}
	testenv.Must(t, pod.Del(testenv.Context(t)))
	h.make(t, append([]string{"uninstall"}, directories...)...)
	if after := filesBelow(t, dir); len(after) > 0 {
		t.Errorf("make uninstall: left %q", after)
	}
}

// tryMake runs this machine's make on the node.
func (h *host) tryMake(t *testing.T, args ...string) (output string, err error) {
	t.Helper()
	out, err := h.Node.Command(testenv.Context(t), "make", append([]string{"-C", repository}, args...)...).CombinedOutput()
	return string(out), err
}

func (h *host) make(t *testing.T, args ...string) {
	t.Helper()
	if output, err := h.tryMake(t, args...); err != nil {
		t.Fatalf("make %q: %v: %s", args, err, output)
	}
}

// filesBelow returns the files in a directory, without it.
func filesBelow(t *testing.T, dir string) []string {
	t.Helper()
	found := map[string]bool{}
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			found[strings.TrimPrefix(path, dir)] = true
		}
		return err
	})
	testenv.Must(t, err)
	return slices.Sorted(maps.Keys(found))
}

// TestLintian wants no error and no warning of lintian but those that the package overrides, each with its reason.
func TestLintian(t *testing.T) {
	output, err := exec.Command("lintian", "--allow-root", "--no-tag-display-limit", "--fail-on", "error,warning", deb(t, "present")).CombinedOutput()
	if err != nil {
		t.Errorf("lintian: %v\n%s", err, output)
	}
	var before string
	for line := range strings.Lines(string(testenv.ReadFile(t, repository+"/cmd/release/lintian-overrides"))) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(before, "#") {
			t.Errorf("lintian-overrides: got no reason before %q", line)
		}
		before = line
	}
}
