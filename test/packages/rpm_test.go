package packages

import (
	"os/exec"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const pluginsOfFedora = "/usr/libexec/cni"

// TestRPM installs, upgrades and removes the RPM package. Its scripts run in the bare Debian.
func TestRPM(t *testing.T) {
	h := newHost(t)
	h.rpm(t, "--initdb")
	before := h.files(t)
	h.rpm(t, "-i", "--nodeps", rpm(t)) // its scripts need a shell, of which rpm knows nothing here
	pod := h.runtime(t, pluginsOfFedora).AddPod(t, "web", nil)
	if err := h.tryRPM(t, "-e", "ebpfnet"); err == nil {
		t.Error("rpm -e: got success, want a failure while a container is connected")
	}
	h.loadOlder(t)
	h.rpm(t, "-U", "--nodeps", "--replacepkgs", rpm(t))
	h.run(t, []string{"ebpfnetctl", "upgrade"}, "already loaded")
	h.run(t, []string{"/opt/cni/bin/ebpfnet"}, "CNI protocol versions supported")
	if err := pod.Del(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	h.rpm(t, "-e", "ebpfnet")
	wantSame(t, before, h.files(t))
}

// tryRPM runs this machine's rpm on the root: the bare Debian has none.
func (h *host) tryRPM(t *testing.T, args ...string) error {
	t.Helper()
	args = append([]string{"--root", h.root, "--dbpath", "/var/lib/rpm"}, args...)
	out, err := h.Node.Command(testenv.Context(t), "rpm", args...).CombinedOutput()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		t.Fatal(err)
	}
	t.Logf("rpm %q: %v: %s", args, err, out)
	return err
}

func (h *host) rpm(t *testing.T, args ...string) {
	t.Helper()
	if err := h.tryRPM(t, args...); err != nil {
		t.Fatal(err)
	}
}
