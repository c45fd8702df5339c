package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ports are those from first to last.
type ports struct{ first, last uint16 }

// masqPorts returns the node's masquerading ports: one or two ranges.
func (n *network) masqPorts(t *testing.T) (ranges []ports) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, r := range datapath.Config.MasqPorts {
			if r.Count > 0 {
				ranges = append(ranges, ports{r.First, r.First + r.Count - 1})
			}
		}
	})
	return ranges
}

// countMasqPorts returns how many ports masquerading may choose.
func (n *network) countMasqPorts(t *testing.T) (count int) {
	t.Helper()
	for _, r := range n.masqPorts(t) {
		count += int(r.last) - int(r.first) + 1
	}
	return count
}

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

// Host processes bind ports in and around the masquerade range, and use them with the same remote as pods,
// before the pods do and afterwards.
func TestHostSocketsInMasqueradeRange(t *testing.T) {
	const clients = 20

	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	ranges := n.masqPorts(t)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		c := &connections{server: n.Outside}
		for _, r := range ranges {
			for _, port := range []uint16{r.first - 1, r.first, r.first + 1, r.first + (r.last-r.first)/2, r.last - 1, r.last, r.last + 1} {
				client := connect(t, n.node(), protocol, at(f.Node, port), server)
				defer client.Close()
				c.add(client)
			}
		}
		c.ask(t)
		for range clients {
			client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
			defer client.Close()
			c.add(client)
		}
		c.ask(t)
		c.ask(t)
	})
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

// Masquerading never allocates a port on which a host process listens, so the outside still reaches the
// process. Half of the ports are such, and each connection gets another.
func TestHostListenersInMasqueradeRange(t *testing.T) {
	const (
		first     = 2000
		listeners = 50
		clients   = 20
	)

	n := newNetwork(t)
	n.loadWith(t, loader.Options{MasqPorts: [2]uint16{first, first + 2*listeners - 1}})
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		outside := serve(t, n.Outside, protocol, at(f.Outside, 0))
		for i := range uint16(listeners) {
			serve(t, n.node(), protocol, at(f.Node, first+i))
		}
		for range clients {
			client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, outside)
			defer client.Close()
			if seen := ask(t, client, n.Outside); seen.Port() < first+listeners {
				t.Errorf("pod's connection got port %d, on which the host listens", seen.Port())
			}
		}
		for i := range uint16(listeners) {
			reachUntranslated(t, n.Outside, protocol, at(f.Node, first+i), n.node())
		}
	})
}
