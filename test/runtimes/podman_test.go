package runtimes

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const podmanConfig = `
[containers]
cgroups = "disabled"
[engine]
cgroup_manager = "cgroupfs"
lock_type = "file"
runtime = "crun"
[network]
network_backend = "cni"
cni_plugin_dirs = ["` + pluginDir + `"]
network_config_dir = "` + configDir + `"
`

const podmanStorage = `
[storage]
driver = "vfs"
graphroot = "/run/storage"
runroot = "/run/storage-run"
`

// podman is podman 4 with its CNI backend.
type podman struct{ *machine }

func newPodman(t *testing.T) podman {
	t.Helper()
	p := podman{newMachine(t, example(t, "example.conflist"))}
	p.write(t, "/run/containers.conf", []byte(podmanConfig))
	p.write(t, "/run/storage.conf", []byte(podmanStorage))
	p.env = append(p.env, "CONTAINERS_CONF=/run/containers.conf", "CONTAINERS_STORAGE_CONF=/run/storage.conf")
	p.install(t, "/bin/busybox", "/run/rootfs/bin/busybox")
	p.write(t, "/run/rootfs/www/index.html", []byte("hello"))
	return p
}

// serve runs a container "web" with a web server on port 80, which is the node's 8080.
func (p podman) serve(t *testing.T, options ...string) {
	t.Helper()
	args := append([]string{"run", "--detach", "--name", "web", "--network", "pods", "--publish", "8080:80"}, options...)
	p.run(t, "podman", append(args, "--rootfs", "/run/rootfs", "/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/www")...)
}

// wantPublished wants the container's web server at port 8080 of the node's addresses, from everywhere.
func (p podman) wantPublished(t *testing.T) {
	t.Helper()
	for _, client := range []*testenv.Namespace{p.Node, p.Outside} {
		for _, addr := range []netip.Addr{testenv.NodeAddr4, testenv.NodeAddr6} {
			url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(addr, 8080))
			testenv.Eventually(t, "the web server", func() error {
				body, err := testenv.HTTPGet(testenv.Context(t), client, url)
				if err == nil && body != "hello" {
					err = fmt.Errorf("get %s from %s: got %q, want hello", url, client.Name, body)
				}
				return err
			})
		}
	}
}

func (p podman) wantNoAttachment(t *testing.T) {
	t.Helper()
	if got := p.run(t, "ebpfnetctl", "attachments", "-o", "json"); got != "[]" {
		t.Errorf("attachments: got %s, want none", got)
	}
}

// TestPodmanReconnect takes the network of a running container with a published port, and gives it back. Meanwhile
// conmon, a child of init, listens on the port.
func TestPodmanReconnect(t *testing.T) {
	p := newPodman(t)
	p.serve(t)
	p.wantPublished(t)
	p.run(t, "podman", "network", "disconnect", "pods", "web")
	p.wantNoAttachment(t)
	p.run(t, "podman", "network", "connect", "pods", "web")
	p.wantPublished(t)
	p.run(t, "podman", "rm", "--force", "--time", "0", "web")
	p.wantNoAttachment(t)
}

// TestPodmanStaticAddress has a published port beside an address of its own, which podman requests by a capability.
// It also does so for the present addresses, when it makes a network again.
func TestPodmanStaticAddress(t *testing.T) {
	p := newPodman(t)
	p.serve(t, "--ip", "10.88.7.7", "--ip6", "fd00:88::77")
	p.wantPublished(t)
	p.run(t, "podman", "network", "reload", "web")
	p.wantPublished(t)
	const format = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.GlobalIPv6Address}}{{end}}"
	if got, want := p.run(t, "podman", "inspect", "--format", format, "web"), "10.88.7.7 fd00:88::77"; got != want {
		t.Errorf("addresses after reload: got %s, want %s", got, want)
	}
	p.run(t, "podman", "rm", "--force", "--time", "0", "web")
	p.wantNoAttachment(t)
}
