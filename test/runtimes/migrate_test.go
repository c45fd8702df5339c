package runtimes

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ptpConflist is what a host has before ebpfnet.
const ptpConflist = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [
	{"type": "ptp", "ipMasq": true, "ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
		"ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]]}},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`

// echo is an open connection to an echo server.
type echo struct {
	net.Conn
	reader *bufio.Reader
}

// connect opens a connection to the container's server, which is port 8080 of an address.
func (p podman) connect(t *testing.T, client *testenv.Namespace, addr string) *echo {
	t.Helper()
	e := &echo{}
	testenv.Eventually(t, "the echo server", func() (err error) {
		if e.Conn, err = client.Dial(testenv.Context(t), "tcp", netip.AddrPortFrom(netip.MustParseAddr(addr), 8080)); err != nil {
			return err
		}
		e.reader = bufio.NewReader(e.Conn)
		if err = e.ask(); err != nil {
			e.Close()
		}
		return err
	})
	t.Cleanup(func() { e.Close() })
	return e
}

// ask wants an answer over the same connection.
func (e *echo) ask() error {
	e.SetDeadline(time.Now().Add(testenv.Timeout))
	if _, err := fmt.Fprintln(e, "still there?"); err != nil {
		return err
	}
	answer, err := e.reader.ReadString('\n')
	if err == nil && answer != "still there?\n" {
		err = fmt.Errorf("got %q, want an echo", answer)
	}
	return err
}

// TestPodmanMigrate leads a network over under a running container with open connections to its published port. The
// container ends as podman ends it, by libcni's cache, and the next one is ebpfnet's. Then it goes back.
func TestPodmanMigrate(t *testing.T) {
	p := newPodman(t)
	for _, plugin := range []string{"main/ptp", "meta/portmap", "ipam/host-local"} {
		_, name, _ := strings.Cut(plugin, "/")
		p.install(t, testenv.Build(t, "github.com/containernetworking/plugins/plugins/"+plugin), pluginDir+"/"+name)
	}
	p.write(t, configDir+"/10-ebpfnet.conflist", []byte(ptpConflist))
	p.run(t, "podman", "run", "--detach", "--name", "echo", "--network", "pods", "--publish", "8080:7", "--rootfs", "/run/rootfs",
		"/bin/busybox", "nc", "-ll", "-p", "7", "-e", "/bin/busybox", "cat")
	open := []*echo{p.connect(t, p.Outside, testenv.NodeAddr4.String()), p.connect(t, p.Node, testenv.NodeAddr4.String()), p.connect(t, p.Node, "127.0.0.1")}
	wantOpen := func(when string) {
		t.Helper()
		for _, e := range open {
			if err := e.ask(); err != nil {
				t.Errorf("%s: connection of %v: %v", when, e.LocalAddr(), err)
			}
		}
	}
	migrate := func(args ...string) string {
		t.Helper()
		return p.run(t, "ebpfnetctl", append([]string{"migrate", "--conf-dir", configDir, "--bin-dir", pluginDir}, args...)...)
	}
	if plan := migrate("--plan"); !strings.Contains(plan, "  adopt ") || !strings.Contains(plan, "host ports 8080/tcp") {
		t.Errorf("plan: got %s, want to adopt the container, with its host port", plan)
	}
	migrate()
	wantOpen("after migrate")
	migrate("--back")
	wantOpen("after migrate --back")
	p.wantNoAttachment(t)
	migrate()
	wantOpen("after the second migrate")
	open = append(open, p.connect(t, p.Outside, testenv.NodeAddr4.String()))

	p.run(t, "podman", "rm", "--force", "--time", "0", "echo")
	p.wantNoAttachment(t)
	if rules := p.run(t, "iptables-save", "-t", "nat"); strings.Contains(rules, "10.88.") {
		t.Errorf("rules: got %s, want none of the container", rules)
	}
	p.serve(t)
	p.wantPublished(t)
	if got := p.run(t, "ebpfnetctl", "ports"); !strings.Contains(got, "8080") {
		t.Errorf("ports: got %s, want the new container's", got)
	}
	p.run(t, "podman", "rm", "--force", "--time", "0", "web")
	migrate("--back")
	if list := p.run(t, "cat", configDir+"/10-ebpfnet.conflist"); list != ptpConflist {
		t.Errorf("list: got %s, want the old one", list)
	}
}
