package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// masqPorts returns the first and the last port of the node's masquerade range.
func (n *network) masqPorts(t *testing.T) (first, last uint16) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		first = datapath.Config.MasqPortFirst
		last = first + datapath.Config.MasqPortCount - 1
	})
	return first, last
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
	first, last := n.masqPorts(t)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		c := &connections{server: n.Outside}
		for _, port := range []uint16{first - 1, first, first + 1, (first + last) / 2, last - 1, last, last + 1} {
			client := connect(t, n.node(), protocol, at(f.Node, port), server)
			defer client.Close()
			c.add(client)
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
// process.
func TestHostListenersInMasqueradeRange(t *testing.T) {
	const listeners = 50

	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	first, _ := n.masqPorts(t)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		outside := serve(t, n.Outside, protocol, at(f.Outside, 0))
		for i := range uint16(listeners) {
			serve(t, n.node(), protocol, at(f.Node, first+i))
		}
		// Candidate ports follow the local port at a fixed distance, so these connections would get exactly
		// the listeners' ports.
		base := connect(t, pod.Namespace, protocol, at(f.Pod(pod), 40000), outside)
		defer base.Close()
		distance := ask(t, base, n.Outside).Port() - 40000
		for i := range uint16(listeners) {
			local := first + i - distance
			if local == 40000 || local < 1024 {
				continue
			}
			client := connect(t, pod.Namespace, protocol, at(f.Pod(pod), local), outside)
			defer client.Close()
			if seen := ask(t, client, n.Outside); seen == at(f.Node, first+i) {
				t.Errorf("pod's connection got port %d, on which the host listens", seen.Port())
			}
			reachUntranslated(t, n.Outside, protocol, at(f.Node, first+i), n.node())
		}
	})
}
