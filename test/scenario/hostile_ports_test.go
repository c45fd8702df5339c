package scenario

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// claimed are ports of the node that a hostile pod's flows to one remote have got.
type claimed struct {
	protocol string
	remote   netip.AddrPort
	flows    map[uint16]maps.Flow // by the port of the node
}

const (
	claims      = 1000
	remotePort  = 7000
	hostilePort = 20000 // first of the pod
)

// claim opens flows from a pod to a remote. With answered, the accomplice answers, and a TCP connection is
// established.
func (n *network) claim(t *testing.T, bad *testenv.Pod, f testenv.Family, protocol string, remote netip.AddrPort, answered bool) claimed {
	t.Helper()
	pod, outside := wireOf(t, bad), n.outsideWire(t)
	pod.send(t, openings(protocol, f.Pod(bad), hostilePort, claims, remote)...)
	c := claimed{protocol, remote, map[uint16]maps.Flow{}}
	testenv.Eventually(t, "flows of the hostile pod", func() error {
		for _, flow := range n.masqueraded(t, remote, protocol) {
			c.flows[flow.Local.Port()] = flow
		}
		if len(c.flows) < claims*9/10 {
			return fmt.Errorf("got %d, want about %d", len(c.flows), claims)
		}
		return nil
	})
	if !answered {
		return c
	}
	var replies, thirds []testenv.Packet
	for _, flow := range c.flows {
		reply := testenv.TCPPacket(remote, flow.Local, testenv.SYN|testenv.ACK, "")
		reply.Ack = reply.Seq + 1
		replies = append(replies, reply)
		third := testenv.TCPPacket(flow.NAT, remote, testenv.ACK, "")
		third.Seq, third.Ack = third.Seq+1, reply.Seq+1
		thirds = append(thirds, third)
	}
	outside.send(t, replies...)
	pod.send(t, thirds...)
	return c
}

// attempts are what the remote sends to the ports, each the first packet of a connection.
func (c claimed) attempts() (packets []testenv.Packet) {
	for _, flow := range c.flows {
		packets = append(packets, opening(c.protocol, c.remote, flow.Local))
	}
	return packets
}

// count counts the ports to which the remote's first packets have come. SYNs that are replies do not count.
func (c claimed) count(seen map[uint16]bool, packets []testenv.Packet) {
	for _, p := range packets {
		from := at(p.Src, p.SrcPort) == c.remote
		if from && (p.Proto == unix.IPPROTO_UDP || p.TCPFlags == testenv.SYN) {
			seen[p.DstPort] = true
		}
	}
}

// forEachClaim runs a test beside a hostile pod, bad, that has opened flows, with and without answers.
func (n *network) forEachClaim(t *testing.T, test func(t *testing.T, f testenv.Family, bad *testenv.Pod, c claimed, answered bool)) {
	port := uint16(remotePort)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		claim := func(t *testing.T, answered bool) {
			bad := n.AddPod(t, "bad", nil)
			defer del(t, bad)
			remote := sibling(f.Outside, 99)
			n.addSilentRemote(t, f)
			mute(t, bad, remote, protocol)
			c := n.claim(t, bad, f, protocol, at(remote, port), answered)
			port++
			test(t, f, bad, c, answered)
		}
		claim(t, false)
		if protocol == "tcp" {
			t.Run("established", func(t *testing.T) { claim(t, true) })
		}
	})
}

// wantAll wants the remote's packets for each port at the right receiver, and none at the wrong one.
func (c claimed) wantAll(t *testing.T, right, wrong func(*testing.T) []testenv.Packet) {
	t.Helper()
	atRight, atWrong := map[uint16]bool{}, map[uint16]bool{}
	within(t, "the remote's packets", func() error {
		c.count(atRight, right(t))
		c.count(atWrong, wrong(t))
		if got := len(atRight) + len(atWrong); got < len(c.flows) {
			return fmt.Errorf("got %d of %d", got, len(c.flows))
		}
		return nil
	})
	c.count(atWrong, wrong(t))
	if len(atRight) != len(c.flows) || len(atWrong) > 0 {
		t.Errorf("of %d connections %d reached their server and %d the hostile pod, want all and 0",
			len(c.flows), len(atRight), len(atWrong))
	}
}

// A pod opens flows from a thousand ports, and reads which ports of the node they got. Then servers of the node listen
// on each of these, and the remote connects to it from the port that the flows went to.
func TestClaimedPortsBecomeServersOfNode(t *testing.T) {
	n := newNetwork(t)
	n.forEachClaim(t, func(t *testing.T, f testenv.Family, bad *testenv.Pod, c claimed, _ bool) {
		for port := range c.flows {
			n.listen(t, c.protocol, at(f.Node, port))
		}
		number := unix.IPPROTO_TCP
		if c.protocol == "udp" {
			number = unix.IPPROTO_UDP
		}
		node := openRaw(t, n.node(), f.Node, number) // receives what the servers do
		if err := unix.SetsockoptInt(node.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20); err != nil {
			t.Fatal(err)
		}
		wrong := openCapture(t, bad.Namespace, testenv.PodIfName)
		n.outsideWire(t).send(t, c.attempts()...)
		c.wantAll(t, func(t *testing.T) []testenv.Packet { return node.packets(t, f, number) }, wrong.received)
	})
}

// listen opens a server's socket until the end of the test.
func (n *network) listen(t *testing.T, protocol string, addr netip.AddrPort) {
	t.Helper()
	if protocol == "udp" {
		listenPacket(t, n.node(), addr)
		return
	}
	listener, err := n.node().Listen(testenv.Context(t), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
}

// packets returns the segments or datagrams that have come.
func (s *rawSocket) packets(t *testing.T, f testenv.Family, number int) (packets []testenv.Packet) {
	t.Helper()
	for {
		payload, from, err := s.receive(time.Millisecond)
		if err != nil {
			return packets
		}
		l4 := []byte(payload)
		p := testenv.Packet{
			Src: from, Dst: f.Node, Proto: uint8(number),
			SrcPort: binary.BigEndian.Uint16(l4), DstPort: binary.BigEndian.Uint16(l4[2:]),
		}
		if number == unix.IPPROTO_TCP {
			p.TCPFlags = l4[13]
		}
		packets = append(packets, p)
	}
}

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

	wireOf(t, bad).sendFromAllPorts(t, protocol, f.Pod(bad), server)
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
	const patience = 2 * time.Second

	client, err := testenv.NewClient(testenv.Context(t), from, protocol, netip.AddrPort{}, server)
	if err != nil {
		return err
	}
	t.Cleanup(func() { client.Close() })
	return testenv.Wait(testenv.Context(t), "a reply", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := client.Ask(ctx, "hello")
		return err
	})
}

// sendFromAllPorts opens a connection from each port of addr; without -long, from twice as many as fewPorts leaves.
func (w wire) sendFromAllPorts(t *testing.T, protocol string, addr netip.Addr, to netip.AddrPort) {
	t.Helper()
	const batch = 1 << 13 // all need not be in memory at once
	all := workload(batch, batch, 1<<16)
	for first := 1; first < all; first += batch {
		w.send(t, openings(protocol, addr, uint16(first), min(batch, all-first), to)...)
	}
}

// A full table does not take a new flow's first entry for its second, although those that it has are all used.
func TestNewFlowsInFullTable(t *testing.T) {
	const questions = 300 // an LRU map evicts once in 128 entries

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
