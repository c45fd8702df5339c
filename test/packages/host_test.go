package packages

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// host is the node of a topology with a bare Debian as its root.
type host struct {
	*testenv.Topology
	root string
}

// shared are the directories that the plugin, which runs outside of the root, has in common with it.
var shared = []string{"/proc", "/sys", "/dev", "/run", "/var/lib/cni"}

// unpackDebian unpacks Debian once for all tests.
var unpackDebian = sync.OnceValues(func() (dir string, err error) {
	dir = filepath.Join(os.TempDir(), "debian")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	out, err := exec.Command("tar", "-C", dir, "--exclude=./dev/*", "-xf", buildDir+"/debian.tar").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("unpack Debian: %w: %s", err, out)
	}
	return dir, nil
})

// newHost returns a host with a Debian of its own, which is a layer over that of all tests.
func newHost(t *testing.T) *host {
	t.Helper()
	debian, err := unpackDebian()
	testenv.Must(t, err)
	t.Cleanup(func() { // the last step: what the plugin has in common with all roots
		for _, dir := range []string{loader.Root, testenv.ReservationDir, record.DefaultDir} {
			testenv.NoError(t, os.RemoveAll(dir))
		}
	})
	h := &host{Topology: testenv.NewTopology(t), root: filepath.Join(t.TempDir(), "root")}
	layer := t.TempDir()
	for _, dir := range []string{h.root, layer + "/upper", layer + "/work"} {
		testenv.Must(t, os.Mkdir(dir, 0o755))
	}
	testenv.Mount(t, "overlay", h.root, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", debian, layer, layer))
	for _, dir := range shared {
		testenv.Must(t, os.MkdirAll(h.root+dir, 0o755))
		recursive := uintptr(unix.MS_REC)
		if dir == "/run" { // it has the root itself
			recursive = 0
		}
		testenv.Mount(t, dir, h.root+dir, "", unix.MS_BIND|recursive, "")
	}
	return h
}

// try runs a command in the root and returns what it prints.
func (h *host) try(t *testing.T, name string, args ...string) (output string, err error) {
	t.Helper()
	cmd := h.Node.Command(testenv.Context(t), "chroot", append([]string{h.root, name}, args...)...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// run runs a command in the root that must succeed, and wants words in what it prints.
func (h *host) run(t *testing.T, command []string, words ...string) string {
	t.Helper()
	output, err := h.try(t, command[0], command[1:]...)
	if err != nil {
		t.Fatalf("%q: %v: %s", command, err, output)
	}
	wantWords(t, command, output, words)
	return output
}

// refuse runs a command in the root that must fail, and wants words in what it prints.
func (h *host) refuse(t *testing.T, command []string, words ...string) {
	t.Helper()
	output, err := h.try(t, command[0], command[1:]...)
	if err == nil {
		t.Errorf("%q: got success, want a failure: %s", command, output)
	}
	wantWords(t, command, output, words)
}

func wantWords(t *testing.T, command []string, output string, words []string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(output, word) {
			t.Errorf("%q: got %q, want it to contain %q", command, output, word)
		}
	}
}

// dpkg returns a command line that works on a package, which it makes visible in the root.
func (h *host) dpkg(t *testing.T, verb, file string) []string {
	t.Helper()
	name := filepath.Base(file)
	testenv.Must(t, os.WriteFile("/run/"+name, testenv.ReadFile(t, file), 0o644))
	t.Cleanup(func() { os.Remove("/run/" + name) })
	return []string{"dpkg", verb, "/run/" + name}
}

// runtime returns a container runtime that uses the installed plugin and the example that was installed.
func (h *host) runtime(t *testing.T, plugins string) *testenv.Runtime {
	t.Helper()
	example := testenv.ReadFile(t, h.root+"/usr/share/doc/ebpfnet/examples/10-ebpfnet.conflist")
	return testenv.NewRuntime(t, h.Node, example, h.root+plugins)
}

// files lists what is on the host: the root, and what the plugin has in common with it.
func (h *host) files(t *testing.T) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, dir := range []string{h.root, "/var/lib/cni", "/run/ebpfnet", "/sys/fs/bpf"} {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if os.IsNotExist(err) && path == dir {
				return nil
			}
			if err != nil {
				return err
			}
			name := strings.TrimPrefix(path, h.root)
			for _, mounted := range shared {
				if dir == h.root && name == mounted {
					return fs.SkipDir
				}
			}
			found[name] = true
			return nil
		})
		testenv.Must(t, err)
	}
	return found
}
