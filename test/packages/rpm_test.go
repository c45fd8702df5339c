package packages

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const pluginsOfFedora = "/usr/libexec/cni"

// TestRPM installs, upgrades and removes the RPM package. Its scripts run in the bare Debian. Removing is refused, and
// the upgrade loses no packet, while a container is connected.
func TestRPM(t *testing.T) {
	h := newHost(t)
	h.rpm(t, "--initdb")
	h.write(t, "/usr/lib/networkd-dispatcher/routable.d/other", "") // rpm does not know that the directory is another's
	before := h.files(t)
	h.rpm(t, "-i", "--nodeps", rpm(t, "older")) // its scripts need a shell, of which rpm knows nothing here
	pod := h.runtime(t, pluginsOfFedora).AddPod(t, "web", published)
	h.refuseRPM(t, "-e", "ebpfnet")
	h.loadOlder(t)
	load := h.startTraffic(t, pod)
	testenv.NoError(t, load.Lossless(t, func(attempt int) error {
		if attempt > 0 {
			h.loadOlder(t)
		}
		h.rpm(t, "-U", "--nodeps", "--replacepkgs", rpm(t, "present")) // which an earlier attempt has installed
		return nil
	}))
	load.Stop()
	h.wantRPM(t, "0.0.0~test")
	h.run(t, []string{"ebpfnetctl", "version"}, "0.0.0-test")
	h.run(t, []string{"ebpfnetctl", "upgrade"}, "already loaded")
	h.run(t, []string{"/opt/cni/bin/ebpfnet"}, "CNI protocol versions supported")
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK after the upgrade: %v", err)
	}
	h.refuseRPM(t, "-e", "ebpfnet")
	h.wantRPM(t, "0.0.0~test")
	testenv.Must(t, pod.Del(testenv.Context(t)))
	h.rpm(t, "-e", "ebpfnet")
	wantSame(t, before, h.files(t))
}

// TestRPMToOtherLayout runs what rpm runs before an upgrade to a release with another map layout.
func TestRPMToOtherLayout(t *testing.T) {
	h := newHost(t)
	h.rpm(t, "--initdb")
	h.rpm(t, "-i", "--nodeps", rpm(t, "present"))
	pod := h.runtime(t, pluginsOfFedora).AddPod(t, "web", nil)
	script := h.rpm(t, "-q", "--queryformat", "%{PREIN}", "ebpfnet")
	newer := strings.Replace(script, fmt.Sprint("ABI ", loader.ABI), fmt.Sprint("ABI ", loader.ABI+1), 1)
	if newer == script {
		t.Fatalf("no ABI %d in %s", loader.ABI, script)
	}
	const install, upgrade = "1", "2" // how many versions there will be
	h.run(t, []string{"sh", "-c", script, "sh", upgrade})
	h.run(t, []string{"sh", "-c", newer, "sh", install})
	h.refuse(t, []string{"sh", "-c", newer, "sh", upgrade}, "another map layout", "pods web eth0")
	h.run(t, []string{"ebpfnetctl", "status"})
	testenv.Must(t, pod.Del(testenv.Context(t)))
	h.run(t, []string{"sh", "-c", newer, "sh", upgrade}, "unloaded")
}

// TestRecommends wants the package with the loopback that containerd executes to be recommended, and none required.
func TestRecommends(t *testing.T) {
	h := newHost(t)
	if got := h.rpm(t, "-qp", "--recommends", rpm(t, "present")); got != "containernetworking-plugins\n" {
		t.Errorf("rpm: got %q, want containernetworking-plugins", got)
	}
	got := h.rpm(t, "-qp", "--requires", rpm(t, "present"))
	if strings.Contains(got, "networking") || !strings.Contains(got, "/bin/sh\n") || !strings.Contains(got, "coreutils\n") {
		t.Errorf("rpm requires %s, want what its scripts run, and no plugins", got)
	}
	for field, want := range map[string]string{"Recommends": "containernetworking-plugins", "Depends": ""} {
		got, err := exec.Command("dpkg-deb", "--field", deb(t, "present"), field).Output()
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s: got %q (%v), want %q", field, got, err, want)
		}
	}
}

// tryRPM runs this machine's rpm on the root, which has none, and returns what it prints.
func (h *host) tryRPM(t *testing.T, args ...string) (output string, err error) {
	t.Helper()
	args = append([]string{"--root", h.root, "--dbpath", "/var/lib/rpm"}, args...)
	out, err := h.Node.Command(testenv.Context(t), "rpm", args...).CombinedOutput()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		t.Fatal(err)
	}
	return string(out), err
}

func (h *host) rpm(t *testing.T, args ...string) (output string) {
	t.Helper()
	output, err := h.tryRPM(t, args...)
	if err != nil {
		t.Fatalf("rpm %q: %v: %s", args, err, output)
	}
	return output
}

// refuseRPM wants rpm to fail because a container is connected.
func (h *host) refuseRPM(t *testing.T, args ...string) {
	t.Helper()
	output, err := h.tryRPM(t, args...)
	if err == nil {
		t.Errorf("rpm %q: got success, want a failure", args)
	}
	wantWords(t, args, output, []string{"stop the containers first", "pods web eth0"})
}

// wantRPM wants one version to be installed.
func (h *host) wantRPM(t *testing.T, version string) {
	t.Helper()
	if got := h.rpm(t, "-q", "--queryformat", "%{VERSION}\n", "ebpfnet"); got != version+"\n" {
		t.Errorf("installed: got %q, want %s", got, version)
	}
}
