package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// connections are open connections to one server.
type connections struct {
	server *testenv.Namespace
	all    []*testenv.Client
	seen   map[netip.AddrPort]int // index of the client that the server sees as this
}

func (c *connections) add(client *testenv.Client) { c.all = append(c.all, client) }

// ask wants a reply on every connection, and the server to see a distinct address for each.
func (c *connections) ask(t *testing.T) {
	t.Helper()
	if c.seen == nil {
		c.seen = map[netip.AddrPort]int{}
	}
	for i, client := range c.all {
		peer := ask(t, client, c.server)
		if other, known := c.seen[peer]; known && other != i {
			t.Errorf("server sees connection %d (from %s) and connection %d (from %s) as %s",
				i, client.Local(), other, c.all[other].Local(), peer)
		}
		c.seen[peer] = i
	}
	if len(c.seen) != len(c.all) {
		t.Errorf("addresses that the server sees: got %d, want %d", len(c.seen), len(c.all))
	}
}

// A host process binds a port that a pod's connection to the same remote already uses.
func TestHostSocketBindsMasqueradedPort(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		c := &connections{server: n.Outside}
		for range 3 {
			podClient := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
			defer podClient.Close()
			masqueraded := ask(t, podClient, n.Outside)
			c.add(podClient)

			hostClient := connect(t, n.node(), protocol, masqueraded, server)
			defer hostClient.Close()
			if got := hostClient.Local(); got != masqueraded {
				t.Fatalf("host's socket: got address %s, want %s", got, masqueraded)
			}
			c.add(hostClient)
			c.ask(t)
		}
		c.ask(t)
	})
}
