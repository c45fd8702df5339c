package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// masqPorts returns the first and the last port that the node masquerades with.
func (n *network) masqPorts(t *testing.T) (first, last uint16) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		first = datapath.Config.MasqPortFirst
		last = first + datapath.Config.MasqPortCount - 1
	})
	return first, last
}

// connections are clients of one server that all stay open.
type connections struct {
	server *testenv.Namespace
	all    []*testenv.Client
	seen   map[netip.AddrPort]int // what the server sees, by client
}

func (c *connections) add(client *testenv.Client) { c.all = append(c.all, client) }

// ask wants an answer for everyone, and no two that the server cannot tell apart.
func (c *connections) ask(t *testing.T) {
	t.Helper()
	if c.seen == nil {
		c.seen = map[netip.AddrPort]int{}
	}
	for i, client := range c.all {
		peer := ask(t, client, c.server)
		if other, known := c.seen[peer]; known && other != i {
			t.Errorf("connections %d, from %s, and %d, from %s, both look like %s",
				i, client.Local(), other, c.all[other].Local(), peer)
		}
		c.seen[peer] = i
	}
	if len(c.seen) != len(c.all) {
		t.Errorf("%d connections were seen as %d", len(c.all), len(c.seen))
	}
}

// Processes of the host bind ports in and around the range for masquerading, and use them with
// the same remote as pods, before the pods do and afterwards.
func TestHostSocketsInMasqueradeRange(t *testing.T) {
	const clients = 20

	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	first, last := n.masqPorts(t)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		c := &connections{server: n.Outside}
		for _, port := range []uint16{first - 1, first, first + 1, (first + last) / 2, last - 1, last, last + 1} {
			client := connect(t, n.node(), protocol, at(f.node, port), server)
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

// The host binds the very port that a pod's connection to the same remote has already.
func TestHostSocketTakesPortOfPod(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		c := &connections{server: n.Outside}
		for range 3 {
			pods := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
			defer pods.Close()
			taken := ask(t, pods, n.Outside)
			c.add(pods)

			hosts := connect(t, n.node(), protocol, taken, server)
			defer hosts.Close()
			if got := hosts.Local(); got != taken {
				t.Fatalf("the host's socket is bound to %s, want %s", got, taken)
			}
			c.add(hosts)
			c.ask(t)
		}
		c.ask(t)
	})
}

// A port of the host at which a process listens is not taken for a pod, whoever asks first: the
// outside goes on reaching the process.
func TestHostListenersInMasqueradeRange(t *testing.T) {
	const listeners = 50

	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	first, _ := n.masqPorts(t)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		outside := serve(t, n.Outside, protocol, at(f.outside, 0))
		for i := range uint16(listeners) {
			serve(t, n.node(), protocol, at(f.node, first+i))
		}
		// All of these would get the ports of the listeners, one after the other: they move round
		// the range together.
		base := connect(t, pod.Namespace, protocol, at(f.pod(pod), 40000), outside)
		defer base.Close()
		distance := ask(t, base, n.Outside).Port() - 40000
		for i := range uint16(listeners) {
			local := first + i - distance
			if local == 40000 || local < 1024 {
				continue
			}
			client := connect(t, pod.Namespace, protocol, at(f.pod(pod), local), outside)
			defer client.Close()
			if seen := ask(t, client, n.Outside); seen == at(f.node, first+i) {
				t.Errorf("a pod got port %d, at which the host listens", seen.Port())
			}
			reachAsOneself(t, n.Outside, protocol, at(f.node, first+i), n.node())
		}
	})
}
