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

// A pod opens flows from a thousand ports, and reads which ports of the node they got. Then each of these
// becomes a host port of another pod, and the remote connects to it from the port that the flows went to.
func TestClaimedPortsBecomeHostPorts(t *testing.T) {
	n := newNetwork(t)
	n.forEachClaim(t, func(t *testing.T, f testenv.Family, bad *testenv.Pod, c claimed, answered bool) {
		var mappings []mapping
		for port := range c.flows {
			mappings = append(mappings, mapping{HostPort: port, ContainerPort: port, Protocol: c.protocol})
		}
		web := n.AddPod(t, "web", portMappings(mappings...))
		defer del(t, web)
		right, wrong := openCapture(t, web.Namespace, testenv.PodIfName), openCapture(t, bad.Namespace, testenv.PodIfName)
		if answered { // the remote has the connections itself: their ports are not for the host port
			n.outsideWire(t).send(t, c.attempts()...)
			c.remote = at(sibling(f.Outside, 98), c.remote.Port())
		}
		n.outsideWire(t).send(t, c.attempts()...)
		c.wantAll(t, right.received, wrong.received)
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

// The same where the ports become those of the node's own servers.
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

// halfOpen are ways of holding a port without a connection: what the pod sends first, and what its accomplice
// answers.
var halfOpen = []struct {
	name          string
	first, answer uint8
}{
	{"SYN, SYN+ACK", testenv.SYN, testenv.SYN | testenv.ACK},
	{"SYN, ACK", testenv.SYN, testenv.ACK},
	{"ACK, ACK", testenv.ACK, testenv.ACK},
}

// Ports that are held without a handshake become free in minutes, not in days. The pod holds all that it can
// get, and wants as many again.
func TestHalfOpenConnectionsExpire(t *testing.T) {
	const ports, again = 4096, 2000

	n := newNetwork(t)
	n.fewPorts(t)
	n.loadWithShortTimeouts(t)
	bad := n.AddPod(t, "bad", nil)
	pod, outside := wireOf(t, bad), n.outsideWire(t)
	remoteOf := func(f testenv.Family, i int) netip.AddrPort { return at(sibling(f.Outside, 99), uint16(remotePort+i)) }
	for _, f := range testenv.Families {
		mute(t, bad, n.addSilentRemote(t, f), "tcp")
		for i, tc := range halfOpen {
			var packets []testenv.Packet
			for port := range ports {
				packets = append(packets, testenv.TCPPacket(at(f.Pod(bad), uint16(hostilePort+port)), remoteOf(f, i), tc.first, ""))
			}
			pod.send(t, packets...)
			held := n.masqueraded(t, remoteOf(f, i), "tcp")
			if len(held) < ports/2 {
				t.Errorf("%s by %s: pod holds %d of %d ports, want at least half", tc.name, f.Name, len(held), ports)
			}
			packets = packets[:0]
			for _, flow := range held {
				answer := testenv.TCPPacket(flow.Remote, flow.Local, tc.answer, "")
				answer.Ack = 1001
				packets = append(packets, answer)
			}
			outside.send(t, packets...)
		}
	}
	for _, f := range testenv.Families {
		for i, tc := range halfOpen {
			packets := openings("tcp", f.Pod(bad), hostilePort+10_000, again, remoteOf(f, i))
			within(t, fmt.Sprintf("new ports after %s by %s", tc.name, f.Name), func() error {
				pod.send(t, packets...)
				got := 0
				for _, flow := range n.masqueraded(t, remoteOf(f, i), "tcp") {
					if flow.NAT.Port() >= hostilePort+10_000 {
						got++
					}
				}
				if got < again*99/100 {
					return fmt.Errorf("got %d, want %d", got, again)
				}
				return nil
			})
		}
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

// A stranger sends to all ports of the node in the name of a remote, and the node refuses. That takes no ports
// from pods that open connections to the remote.
func TestStrangersTakeNoPorts(t *testing.T) {
	const connections = 200

	n := newNetwork(t)
	n.fewPorts(t)
	pod := n.AddPod(t, "a", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.addSilentRemote(t, f)
		remote := at(sibling(f.Outside, 99), remotePort)
		for name, flags := range map[string]uint8{"SYN": testenv.SYN, "ACK": testenv.ACK, "SYN+ACK": testenv.SYN | testenv.ACK} {
			t.Run(name, func(t *testing.T) {
				outside := n.outsideWire(t)
				for first := 1024; first < 1<<16; first += 1 << 13 {
					var packets []testenv.Packet
					for port := first; port < min(first+1<<13, 1<<16); port++ {
						packets = append(packets, testenv.TCPPacket(remote, at(f.Node, uint16(port)), flags, ""))
					}
					outside.send(t, packets...)
				}
				before := n.noPortDrops(t)
				atRemote := openCapture(t, n.Outside, testenv.UplinkName)
				wireOf(t, pod).send(t, openings("tcp", f.Pod(pod), hostilePort, connections, remote)...)
				got := map[uint16]bool{}
				within(t, "the pod's connections", func() error {
					for _, p := range atRemote.received(t) {
						if at(p.Dst, p.DstPort) == remote && p.TCPFlags == testenv.SYN {
							got[p.SrcPort] = true
						}
					}
					if len(got) < connections {
						return fmt.Errorf("got %d of %d, and %d drops for lack of a port", len(got), connections, n.noPortDrops(t)-before)
					}
					return nil
				})
			})
			remote = at(remote.Addr(), remote.Port()+1)
		}
	})
}
