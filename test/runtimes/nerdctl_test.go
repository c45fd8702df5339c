package runtimes

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// nerdctl is nerdctl on a node with containerd.
type nerdctl struct{ containerd }

func newNerdctl(t *testing.T) nerdctl {
	t.Helper()
	n := nerdctl{newContainerd(t, debian, example(t, "example.conflist"))}
	n.install(t, testenv.Build(t, "github.com/containerd/nerdctl/cmd/nerdctl"), binDir+"/nerdctl")
	n.installPlugins(t, "main/bridge", "ipam/host-local", "meta/firewall", "meta/portmap", "meta/tuning") // for a network of its own
	n.env = append(n.env, "CONTAINERD_ADDRESS="+containerdSocket)                                         // for ctr
	n.call(t, "load", "--input", "/run/image.tar")
	return n
}

func (n nerdctl) call(t *testing.T, args ...string) string {
	t.Helper()
	return n.run(t, "nerdctl", append([]string{"--address", containerdSocket, "--data-root", "/run/nerdctl", "--cgroup-manager", "cgroupfs"}, args...)...)
}

// publish has the port of IPv4 alone: nerdctl sends 0.0.0.0 for it.
func (n nerdctl) publish(t *testing.T, name string, command ...string) (id string) {
	t.Helper()
	args := []string{"run", "--detach", "--name", name, "--net", "pods", "--publish", "8080:80", "--runtime", binDir + "/runc", image, "/bin/busybox"}
	return n.call(t, append(args, command...)...)
}

func (n nerdctl) remove(t *testing.T, id string) {
	t.Helper()
	n.call(t, "rm", "--force", id)
}

// TestNerdctl has a container with a published port, which nerdctl asks for in a hook of the container.
func TestNerdctl(t *testing.T) {
	n := newNerdctl(t)
	before := n.state(t)
	for range 2 {
		web := n.publish(t, "web", webServer...)
		n.wantPublishedAt(t, testenv.NodeAddr4)
		n.wantNamed(t, "web")
		n.remove(t, web)
		n.wantState(t, before)
	}
}
