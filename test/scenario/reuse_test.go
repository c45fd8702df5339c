package scenario

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// sibling returns addr with another last byte.
func sibling(addr netip.Addr, last byte) netip.Addr {
	bytes := addr.AsSlice()
	bytes[len(bytes)-1] = last
	sibling, _ := netip.AddrFromSlice(bytes)
	return sibling
}

// A host port moves from pod to pod under every kind of client, each of which keeps its socket.
func TestHostPortReuseForLocalClients(t *testing.T) {
	n := newNetwork(t)
	neighbor := n.AddPod(t, "neighbor", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		var clients []*testenv.Client
		for _, from := range []struct {
			ns *testenv.Namespace
			to netip.Addr
		}{
			{n.Outside, f.Node}, {n.node(), f.Node}, {n.node(), f.Loopbacks[0]}, {neighbor.Namespace, f.Gateway},
		} {
			client := connect(t, from.ns, "udp", netip.AddrPort{}, at(from.to, 8080))
			defer client.Close()
			clients = append(clients, client)
		}
		for i := range 3 {
			pod := n.AddPod(t, "turn", mapBoth(8080, uint16(80+i)))
			serve(t, pod.Namespace, "udp", at(f.Pod(pod), uint16(80+i)))
			for _, client := range clients {
				ask(t, client, pod.Namespace)
			}
			del(t, pod)
			for _, client := range clients {
				if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("request from %s after DEL: %v, want a refusal", client.Local(), err)
				}
			}
		}
	})
}

// After DEL, a client's next packet on an open connection gets a reset.
func TestHostPortResetsConnections(t *testing.T) {
	n := newNetwork(t)
	neighbor := n.AddPod(t, "neighbor", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		web := n.AddPod(t, "web", mapBoth(8080, 80))
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		var clients []*testenv.Client
		for from, to := range map[*testenv.Namespace]netip.Addr{
			n.Outside: f.Node, n.node(): f.Loopbacks[0], neighbor.Namespace: f.Node,
		} {
			client := connect(t, from, "tcp", netip.AddrPort{}, at(to, 8080))
			defer client.Close()
			ask(t, client, web.Namespace)
			clients = append(clients, client)
		}
		del(t, web)
		for _, client := range clients {
			if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("request from %s after DEL: %v, want a reset", client.Local(), err)
			}
		}
	})
}

// Packets that the outside still sends to a deleted container do not reach the next one with its address. The
// next one can use the old one's masqueraded port.
func TestAddressReuse(t *testing.T) {
	n := newNetworkWith(t, strings.Replace(allVerbsConflist, `{"portMappings": true}`, `{"portMappings": true, "ips": true}`, 1))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		remote := listenPacket(t, n.Outside, at(f.Outside, 9000))
		old := n.AddPod(t, "old", nil)
		client := at(f.Pod(old), 4000)
		sendTo(t, listenPacket(t, old.Namespace, client), at(f.Outside, 9000), "from the old")
		_, masqueraded := receiveFrom(t, remote)
		addrs := []string{old.Addr4().String(), old.Addr6().String()}
		del(t, old)

		next := n.AddPod(t, "next", map[string]any{"ips": addrs})
		defer del(t, next)
		socket := listenPacket(t, next.Namespace, client)
		sendTo(t, remote, masqueraded, "for the old")
		sendTo(t, socket, at(f.Outside, 9000), "from the next")
		if payload, from := receiveFrom(t, remote); payload != "from the next" || from != masqueraded {
			t.Errorf("remote: got %q from %s, want %q from %s", payload, from, "from the next", masqueraded)
		}
		sendTo(t, remote, masqueraded, "for the next")
		if payload, _ := receiveFrom(t, socket); payload != "for the next" {
			t.Errorf("next pod: got %q, want %q", payload, "for the next")
		}
	})
	testenv.Must(t, n.GC(testenv.Context(t)))
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, flow := range must(maps.Flows(datapath)) {
			t.Errorf("flow after GC: %s", flow)
		}
	})
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
