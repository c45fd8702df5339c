package runtimes

import "testing"

const podmanConfig = `
[containers]
cgroups = "disabled"
[engine]
cgroup_manager = "cgroupfs"
lock_type = "file"
runtime = "crun"
[network]
network_backend = "cni"
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

// publish runs a container whose port 80 is port 8080 of the node.
func (p podman) publish(t *testing.T, name string, command ...string) (id string) {
	t.Helper()
	p.publishWith(t, name, nil, command...)
	return name
}

func (p podman) publishWith(t *testing.T, name string, options []string, command ...string) {
	t.Helper()
	args := append([]string{"run", "--detach", "--name", name, "--network", "pods", "--publish", "8080:80"}, options...)
	p.run(t, "podman", append(append(args, "--rootfs", "/run/rootfs", "/bin/busybox"), command...)...)
}

func (p podman) remove(t *testing.T, id string) {
	t.Helper()
	p.run(t, "podman", "rm", "--force", "--time", "0", id)
}

// TestPodmanReconnect takes the network of a running container with a published port, and gives it back. Meanwhile
// conmon, a child of init, listens on the port.
func TestPodmanReconnect(t *testing.T) {
	p := newPodman(t)
	p.publish(t, "web", webServer...)
	p.wantPublished(t)
	p.wantNamed(t, "web")
	p.run(t, "podman", "network", "disconnect", "pods", "web")
	p.wantNoAttachment(t)
	p.run(t, "podman", "network", "connect", "pods", "web")
	p.wantPublished(t)
	p.remove(t, "web")
	p.wantNoAttachment(t)
}

// TestPodmanStaticAddress has a published port beside an address of its own, which podman requests by a capability.
// It also does so for the present addresses, when it makes a network again.
func TestPodmanStaticAddress(t *testing.T) {
	p := newPodman(t)
	p.publishWith(t, "web", []string{"--ip", "10.84.7.7", "--ip6", "fd00:84::77"}, webServer...)
	p.wantPublished(t)
	p.run(t, "podman", "network", "reload", "web")
	p.wantPublished(t)
	const format = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.GlobalIPv6Address}}{{end}}"
	if got, want := p.run(t, "podman", "inspect", "--format", format, "web"), "10.84.7.7 fd00:84::77"; got != want {
		t.Errorf("addresses after reload: got %s, want %s", got, want)
	}
	p.remove(t, "web")
	p.wantNoAttachment(t)
}
