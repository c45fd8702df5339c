package runtimes

import (
	"fmt"
	"net/netip"
	"path"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// former is what a host has before ebpfnet.
type former struct {
	conflist string
	plugins  []string
	addrs    []netip.Addr // of the node, with families that containers have
}

var ptp = former{`{"cniVersion": "1.0.0", "name": "pods", "plugins": [
	{"type": "ptp", "ipMasq": true, "ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
		"ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]]}},
	{"type": "portmap", "capabilities": {"portMappings": true}}]}`,
	[]string{"main/ptp", "meta/portmap", "ipam/host-local"}, []netip.Addr{testenv.NodeAddr4, testenv.NodeAddr6}}

// podmansOwn is podman 4's own network but for the name.
var podmansOwn = former{`{"cniVersion": "0.4.0", "name": "pods", "plugins": [
	{"type": "bridge", "bridge": "cni-podman0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
		"ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.88.0.0/16", "gateway": "10.88.0.1"}]]}},
	{"type": "portmap", "capabilities": {"portMappings": true}},
	{"type": "firewall"},
	{"type": "tuning"}]}`,
	[]string{"main/bridge", "meta/portmap", "meta/firewall", "meta/tuning", "ipam/host-local"}, []netip.Addr{testenv.NodeAddr4}}

// publisher is a runtime that starts containers whose port 80 is port 8080 of the node.
type publisher interface {
	publish(t *testing.T, name string, command ...string) (id string)
	remove(t *testing.T, id string)
}

// testMigrate leads a network over under a running container with open connections to its published port. The
// container ends as its runtime ends it, and the next one is ebpfnet's. Then it goes back. loaded waits until the
// runtime has read its network again.
func testMigrate(t *testing.T, m *machine, p publisher, before former, loaded func(plugin string)) {
	t.Helper()
	m.installPlugins(t, before.plugins...)
	m.write(t, configDir+"/10-ebpfnet.conflist", []byte(before.conflist))
	loaded(path.Base(before.plugins[0]))
	migrate := func(args ...string) string {
		t.Helper()
		return m.run(t, "ebpfnetctl", append([]string{"migrate"}, args...)...)
	}

	echo := p.publish(t, "echo", echoServer...)
	open := m.connections(t, "127.0.0.1")
	if plan := migrate("--plan"); !strings.Contains(plan, "  adopt ") || !strings.Contains(plan, "echo eth0 (") {
		t.Errorf("plan: got %s, want to adopt the container", plan)
	}
	migrate()
	open.want(t, "after migrate")
	migrate("--back")
	open.want(t, "after migrate --back")
	m.wantNoAttachment(t)
	migrate()
	open.want(t, "after the second migrate")
	m.connect(t, m.Outside, testenv.NodeAddr4.String())
	loaded("ebpfnet")

	p.remove(t, echo)
	m.wantNoAttachment(t)
	if rules := m.run(t, "iptables-save", "-t", "nat"); strings.Contains(rules, "10.88.") {
		t.Errorf("rules: got %s, want none of the container", rules)
	}
	web := p.publish(t, "web", webServer...)
	m.wantPublishedAt(t, before.addrs...)
	if got := m.run(t, "ebpfnetctl", "ports", "web"); !strings.Contains(got, "8080") {
		t.Errorf("ports: got %s, want the new container's", got)
	}
	p.remove(t, web)
	migrate("--back")
	if list := m.run(t, "cat", configDir+"/10-ebpfnet.conflist"); list != before.conflist {
		t.Errorf("list: got %s, want the old one", list)
	}
}

// TestPodmanMigrate has a runtime that ends a container by the list in libcni's cache, and reads lists at each call.
func TestPodmanMigrate(t *testing.T) {
	for name, before := range map[string]former{"ptp": ptp, "its own network": podmansOwn} {
		t.Run(name, func(t *testing.T) {
			p := newPodman(t)
			testMigrate(t, p.machine, p, before, func(string) {})
		})
	}
}

// TestContainerdMigrate has a runtime that ends a container by the present list, and reads it when it changes.
func TestContainerdMigrate(t *testing.T) {
	eachContainerd(t, func(t *testing.T, c containerd) {
		testMigrate(t, c.machine, c, ptp, func(plugin string) {
			testenv.Eventually(t, "the list in containerd", func() error {
				status, err := c.Status(testenv.Context(t), &cri.StatusRequest{Verbose: true})
				if err == nil && !strings.Contains(status.Info["cniconfig"], fmt.Sprintf("%q", plugin)) {
					err = fmt.Errorf("got %s, want plugin %s", status.Info["cniconfig"], plugin)
				}
				return err
			})
		})
	})
}
