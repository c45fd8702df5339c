package runtimes

import (
	"errors"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestNewcomer does what the README says on a bare Debian 12 with its containerd: install the package, copy the list,
// and start a container with a host port.
func TestNewcomer(t *testing.T) {
	system, err := filepath.Abs("../../bin/runtimes/debian.tar")
	testenv.Must(t, err)
	const release = "../../bin/release/0.0.0-test/"
	debs, err := filepath.Glob(release + "ebpfnet_*_" + runtime.GOARCH + ".deb")
	if err != nil || len(debs) != 1 {
		t.Fatalf("got packages %q, %v; want one: see `make test-runtimes`", debs, err)
	}

	m := startMachine(t, system)
	m.env = []string{"PATH=" + binDir + ":/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"}
	m.install(t, debs[0], "/run/ebpfnet.deb")
	m.run(t, "apt-get", "install", "--yes", "/run/ebpfnet.deb")
	m.run(t, "mkdir", "-p", configDir)
	m.run(t, "cp", "/usr/share/doc/ebpfnet/examples/10-ebpfnet.conflist", configDir)
	inDebian := debian
	inDebian.config = strings.Replace(debian.config, "sandbox_image", "cni.bin_dir = '/usr/lib/cni'\nsandbox_image", 1)
	c := startContainerd(t, m, inDebian)
	web := c.publish(t, "web", webServer...)
	m.wantPublished(t)
	for _, line := range strings.Split(m.run(t, "ebpfnetctl", "doctor"), "\n")[1:] {
		if fields := strings.Fields(line); len(fields) < 2 || fields[1] != "good" {
			t.Errorf("doctor: got %s, want good", line)
		}
	}
	c.remove(t, web)
	m.wantNoAttachment(t)
	c.wantLoopback(t)
	m.install(t, release+"ebpfnet-0.0.0-test-image.tar", "/run/agent.tar")
	c.wantAgentImage(t)
	m.run(t, "apt-get", "purge", "--yes", "ebpfnet")
}

// wantAgentImage imports the release's image as the documents say. Then a kubelet finds it by the manifests' name.
func (c containerd) wantAgentImage(t *testing.T) {
	t.Helper()
	c.run(t, "ctr", "--namespace", "k8s.io", "images", "import", "/run/agent.tar")
	testenv.Eventually(t, "the agent's image", func() error {
		request := &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: "ebpfnet-node:0.0.0-test"}}
		status, err := c.images.ImageStatus(testenv.Context(t), request)
		if err == nil && status.Image == nil {
			err = errors.New("there is none")
		}
		return err
	})
}

// wantLoopback takes the plugin away that containerd executes beside the list. doctor says so, and which package has it.
func (c containerd) wantLoopback(t *testing.T) {
	t.Helper()
	c.run(t, "mkdir", "-p", pluginDir)
	c.run(t, "mv", "/usr/lib/cni/loopback", pluginDir)
	if _, err := c.runPod(testenv.Context(t), pod("without", 0)); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("a pod without loopback: got %v, want an error that names it", err)
	}
	const remedy = "package containernetworking-plugins"
	output, err := c.command(testenv.Context(t), "ebpfnetctl", "doctor").CombinedOutput()
	if err == nil || !strings.Contains(string(output), remedy) || !strings.Contains(string(output), `"loopback" is not there`) {
		t.Errorf("doctor without loopback: got %v, %s; want the remedy %s", err, output, remedy)
	}
	c.run(t, "mv", pluginDir+"/loopback", "/usr/lib/cni")
	if _, err := c.runPod(testenv.Context(t), pod("with", 0)); err != nil {
		t.Errorf("a pod after the remedy: %v", err)
	}
	all, err := c.ListPodSandbox(testenv.Context(t), &cri.ListPodSandboxRequest{}) // containerd keeps the first one, too
	testenv.Must(t, err)
	for _, sandbox := range all.Items {
		c.remove(t, sandbox.Id)
	}
}
