package scenario

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A pod sends from all its ports to one server, outside or behind a host port. Other clients still get ports.
func TestPodsShareTheirPorts(t *testing.T) {
	n := newNetwork(t)
	if !*long {
		n.fewPorts(t)
	}
	bad, other := n.AddPod(t, "bad", nil), n.AddPod(t, "other", nil)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		mute(t, bad, f.Outside, protocol)
		mute(t, bad, f.Node, protocol)
		outside := serve(t, n.Outside, protocol, at(f.Outside, 0))
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		t.Run("outside", func(t *testing.T) {
			n.wantPorts(t, f, protocol, bad, outside, other.Namespace)
		})
		t.Run("host port", func(t *testing.T) {
			n.wantPorts(t, f, protocol, bad, at(f.Node, 8080), other.Namespace, n.node())
		})
	})
}

// wantPorts wants connections of the clients while a hostile pod holds all the ports it can get.
func (n *network) wantPorts(t *testing.T, f testenv.Family, protocol string, bad *testenv.Pod, server netip.AddrPort, clients ...*testenv.Namespace) {
	t.Helper()
	const connections = 100 // of two clients: 200 more of 1,024 ports that are left would make a lack likely

	n.sendFromAllPorts(t, protocol, bad, f.Pod(bad), server)
	before := n.noPortDrops(t)
	for _, client := range clients {
		var failed []error
		for range connections {
			if err := askUntilReply(t, client, protocol, server); err != nil {
				failed = append(failed, err)
			}
			if len(failed) == 3 { // no need to wait for all of them
				break
			}
		}
		if len(failed) > 0 {
			t.Errorf("%s beside the hostile pod: %d connections failed (%v), want none", client.Name, len(failed), failed[0])
		}
	}
	if drops := n.noPortDrops(t) - before; drops > 0 {
		t.Errorf("drops for lack of a port: got %d, want none", drops)
	}
}

// askUntilReply sends requests over a new socket, since the server may have no room for a datagram behind those of a
// flood. The socket stays open.
func askUntilReply(t *testing.T, from *testenv.Namespace, protocol string, server netip.AddrPort) error {
	t.Helper()
	client, err := testenv.NewClient(testenv.Context(t), from, protocol, netip.AddrPort{}, server)
	if err != nil {
		return err
	}
	t.Cleanup(func() { client.Close() })
	_, err = askAgain(testenv.Context(t), client)
	return err
}

// askAgain sends a request until there is a reply.
func askAgain(ctx context.Context, client *testenv.Client) (reply testenv.Reply, err error) {
	const patience = 2 * time.Second

	err = testenv.Wait(ctx, "a reply", func() (err error) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		reply, err = client.Ask(ctx, "hello")
		return err
	})
	return reply, err
}

// sendFromAllPorts opens a connection from each port of addr; without -long, from twice as many as fewPorts leaves. It
// returns when the node has handled all packets: the last one of each batch is forged, so it is dropped and counted.
func (n *network) sendFromAllPorts(t *testing.T, protocol string, pod *testenv.Pod, addr netip.Addr, to netip.AddrPort) {
	t.Helper()
	const batch = 1 << 13 // all need not be in memory at once
	all := workload(batch, batch, 1<<16)
	w, forged := wireOf(t, pod), opening(protocol, to, to)
	for first := 1; first < all; first += batch {
		packets := append(openings(protocol, addr, uint16(first), min(batch, all-first), to), forged)
		n.awaitDrops(t, "the last packet", pod, maps.Reason(bpf.ReasonAddress), 1, func() { w.send(t, packets...) })
	}
}

// A full table does not take a new flow's first entry for its second, although those that it has are all used.
func TestNewFlowsInFullTable(t *testing.T) {
	const (
		questions   = 300   // each with two flows
		hostilePort = 20000 // first of the pod
	)

	n := newNetworkWith(t, withKeys(smallestTable))
	bad, other, web := n.AddPod(t, "bad", nil), n.AddPod(t, "other", nil), n.AddPod(t, "web", quietPorts())
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		mute(t, bad, f.Node, "udp")
		received := replyToAll(t, web.Namespace, at(f.Pod(web), 80))
		serve(t, web.Namespace, "udp", at(f.Pod(web), 81))
		flood := openings("udp", f.Pod(bad), hostilePort, 4000, at(f.Node, 8080))
		for _, packets := range [][]testenv.Packet{flood, flood} {
			wireOf(t, bad).send(t, packets...)
		}
		testenv.Eventually(t, "replies", func() error {
			if got := received(); got < int64(len(flood)) {
				return fmt.Errorf("got %d, want at least %d", got, len(flood))
			}
			return nil
		})
		for i := range questions {
			if _, err := tryAsk(t, other.Namespace, "udp", at(f.Node, 8081)); err != nil {
				t.Fatalf("question %d: %v", i+1, err)
			}
		}
	})
}

// tryAsk sends a request over a new socket. The socket stays open.
func tryAsk(t *testing.T, from *testenv.Namespace, protocol string, server netip.AddrPort) (testenv.Reply, error) {
	t.Helper()
	ctx := testenv.Context(t)
	client, err := testenv.NewClient(ctx, from, protocol, netip.AddrPort{}, server)
	if err != nil {
		return testenv.Reply{}, err
	}
	t.Cleanup(func() { client.Close() })
	return client.Ask(ctx, "hello")
}

// A pod with a host port says that packets of its clients on this host are too big. That must not slow down what
// others on the host send to the same address, which is one of the host's own.
func TestErrorsLowerNoLocalPathMTU(t *testing.T) {
	const mtu = 1280 // the least that IPv6 accepts

	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		serve(t, web.Namespace, "udp", at(f.Pod(web), 80))
		for _, client := range []struct {
			from *testenv.Namespace
			addr netip.Addr
		}{{n.node(), f.Loopbacks[0]}, {n.node(), f.Node}, {a.Namespace, f.Node}} {
			c := connect(t, client.from, "udp", netip.AddrPort{}, at(client.addr, 8080))
			defer c.Close()
			about := testenv.UDPPacket(ask(t, c, web.Namespace), at(f.Pod(web), 80), "x").MustBuild()
			kind := map[bool][2]uint8{true: {3, 4}, false: {2, 0}}[f.Is4()] // packet too big
			tooBig, err := testenv.ICMPErrorPacket(f.Pod(web), about, kind[0], kind[1], mtu, 0)
			testenv.Must(t, err)
			wireOf(t, web).send(t, tooBig)
			ping(t, n.node(), f.Pod(web)) // comes after it
			route, err := client.from.Run(testenv.Context(t), "ip", "route", "get", client.addr.String())
			testenv.Must(t, err)
			if strings.Contains(route, fmt.Sprintf("mtu %d", mtu)) {
				t.Errorf("%s to %s: the kernel uses an MTU of %d: %s", client.from.Name, client.addr, mtu, route)
			}
		}
	})
}
