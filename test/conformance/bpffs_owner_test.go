package conformance

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// asNobody runs a command as a user without privileges.
func asNobody(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %q as nobody: %v: %s", name, args, err, out)
	}
}

func chmod(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	testenv.Must(t, os.Chmod(path, mode))
}

// TestForeignRoot runs on a host whose BPF file system is open to all users. One of them has made the directory of the
// pins before the plugin, or root has opened it. The plugin refuses it and says what to do; after that it works.
func TestForeignRoot(t *testing.T) {
	const bpffs = "/sys/fs/bpf"
	const open = 0o777 | os.ModeSticky
	for _, test := range []struct {
		name  string
		setUp func(*testing.T)
		words []string
		fix   func(*testing.T)
	}{
		{"another user's directory", func(t *testing.T) {
			chmod(t, bpffs, open)
			asNobody(t, "mkdir", "-m", "0700", loader.Root)
		}, []string{loader.Root, "user 65534", "rm -r " + loader.Root}, removeRoot},
		{"another user's link to a directory of root", func(t *testing.T) {
			chmod(t, bpffs, open)
			asNobody(t, "ln", "-s", t.TempDir(), loader.Root)
		}, []string{loader.Root, "user 65534", "rm -r " + loader.Root}, removeRoot},
		{"root's directory with another mode", func(t *testing.T) {
			testenv.Must(t, os.Mkdir(loader.Root, 0o755))
		}, []string{loader.Root, "mode 0755", "chmod 0700 " + loader.Root}, func(t *testing.T) { chmod(t, loader.Root, 0o700) }},
		{"no sticky bit", func(t *testing.T) { chmod(t, bpffs, 0o777) },
			[]string{bpffs, "mode 0777", "chmod 0700 " + bpffs}, func(t *testing.T) { chmod(t, bpffs, 0o700) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newLoadingHost(t)
			t.Cleanup(func() { chmod(t, bpffs, 0o700) })
			p := h.pod(t, "c1", dual("1.1.0"))
			before := h.snapshot(t, p.Namespace)
			test.setUp(t)
			wantError(t, p.try(t, "ADD"), cnierr.CodeNotSupported, test.words...)
			wantError(t, h.status(t, p.conf), codeNotAvailable, test.words...)
			test.fix(t)
			h.wantUnchanged(t, before, p.Namespace)
			p.add(t)
			p.del(t)
		})
	}
}

func removeRoot(t *testing.T) {
	t.Helper()
	testenv.Must(t, os.RemoveAll(loader.Root))
}

// TestOpenBPFFS runs on a host whose BPF file system is open to all users, where the plugin came first: it works, and
// nobody else can hold its lock.
func TestOpenBPFFS(t *testing.T) {
	h := newLoadingHost(t)
	chmod(t, "/sys/fs/bpf", 0o777|os.ModeSticky)
	t.Cleanup(func() { chmod(t, "/sys/fs/bpf", 0o700) })
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	cmd := exec.CommandContext(testenv.Context(t), "flock", "--nonblock", loader.Root, "true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "Permission denied") {
		t.Errorf("lock of nobody: got %q (%v), want permission denied", out, err)
	}
	p.del(t)
}
