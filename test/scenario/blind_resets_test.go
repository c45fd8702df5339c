package scenario

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// blind are packets that an accomplice outside sends to end a connection whose numbers it does not know.
var blind = map[string]uint8{
	"RST": testenv.RST, "RST+ACK": testenv.RST | testenv.ACK, "FIN": testenv.FIN | testenv.ACK,
	"SYN": testenv.SYN, "SYN+ACK": testenv.SYN | testenv.ACK, "ACK": testenv.ACK,
}

// quiet is an idle connection between a pod and the outside.
type quiet struct {
	name           string
	client, server net.Conn
	remote, node   netip.AddrPort // as the outside sees the connection
	opener         netip.AddrPort // the client's own address
}

// openQuiet opens a connection to the outside.
func (n *network) openQuiet(t *testing.T, name string, f testenv.Family, a *testenv.Pod, port uint16) quiet {
	t.Helper()
	remote := at(f.Outside, port)
	client, server := connectPair(t, path{name, a.Namespace, n.Outside, remote, remote})
	return quiet{name, client, server, remote, plain(server.RemoteAddr()), plain(client.LocalAddr())}
}

// openQuietFromOutside is openQuiet for a connection from the outside to host port 8080.
func (n *network) openQuietFromOutside(t *testing.T, name string, f testenv.Family, web *testenv.Pod) quiet {
	t.Helper()
	client, server := connectPair(t, path{name, n.Outside, web.Namespace, at(f.Pod(web), 80), at(f.Node, 8080)})
	return quiet{name, client, server, plain(client.LocalAddr()), at(f.Node, 8080), plain(client.LocalAddr())}
}

// plain returns a TCP address, with a mapped IPv4 address as IPv4.
func plain(addr net.Addr) netip.AddrPort {
	p := addr.(*net.TCPAddr).AddrPort()
	return at(p.Addr().Unmap(), p.Port())
}

// use sends both ways. The server, which cannot restore anything, is the first.
func (q quiet) use(t *testing.T) {
	t.Helper()
	q.pass(t, "server", q.server, q.client)
	q.pass(t, "client", q.client, q.server)
}

// pass sends a byte.
func (q quiet) pass(t *testing.T, sender string, from, to net.Conn) {
	t.Helper()
	if _, err := from.Write([]byte("x")); err != nil {
		t.Fatalf("%s: send from the %s: %v", q.name, sender, err)
	}
	if err := readByte(to); err != nil {
		t.Fatalf("%s: receive from the %s: %v", q.name, sender, err)
	}
}

// expectedSeq returns the number that the node's packets expect of the remote, which has captured them.
func (q quiet) expectedSeq(t *testing.T, remote *capture) uint32 {
	t.Helper()
	for _, p := range slices.Backward(remote.received(t)) {
		if at(p.Dst, p.DstPort) == q.remote && p.TCPFlags&testenv.ACK != 0 {
			return p.Ack
		}
	}
	t.Fatalf("%s: no packet to %s was captured", q.name, q.remote)
	return 0
}

// blindly returns count packets as from the connection's remote, with any numbers but those near the expected one:
// conntrack takes a forged packet for part of the connection if its number happens to be in the window, and loses
// the connection with or without a fast path.
func (q quiet) blindly(flags uint8, count int, expected uint32) []testenv.Packet {
	const near = 1 << 20
	packets := make([]testenv.Packet, count)
	for i := range packets {
		packets[i] = testenv.TCPPacket(q.remote, q.node, flags, "")
		packets[i].Seq, packets[i].Ack = expected+near+rand.Uint32N(math.MaxUint32-2*near), rand.Uint32()
	}
	return packets
}

// conntrack continues to see a connection as established while strangers try to end it, before and after the offload,
// and sees its real end.
func TestConntrackIgnoresBlindResets(t *testing.T) {
	const resets = 1000

	n := newEstablishedNetwork(t)
	n.nft(t, dropInvalid)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	outside, remote := n.outsideWire(t), openCapture(t, n.Outside, testenv.UplinkName)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		port := uint16(remotePort)
		for name, flags := range blind {
			port++
			for direction, open := range map[string]func(t *testing.T) quiet{
				"to the outside":   func(t *testing.T) quiet { return n.openQuiet(t, name, f, a, port) },
				"from the outside": func(t *testing.T) quiet { return n.openQuietFromOutside(t, name, f, web) },
			} {
				t.Run(name+" "+direction, func(t *testing.T) {
					q := open(t)
					expected := q.expectedSeq(t, remote)
					n.wantTracked(t, q, "before the attacks")
					for range 2 {
						outside.send(t, q.blindly(flags, resets, expected)...)
						ping(t, n.Outside, f.Node) // comes after them
						n.wantTracked(t, q, "after an attack")
						for range testenv.OffloadRequests {
							q.use(t)
						}
						n.wantTracked(t, q, "after more traffic")
					}

					q.client.Close()
					q.server.Close()
					testenv.Eventually(t, "conntrack to see the end of "+q.opener.String(), func() error {
						if known := n.tracked(t, q.opener); known != nil && stateOf(known) < tcpLastACK {
							return fmt.Errorf("state: got %d, want at least %d", stateOf(known), tcpLastACK)
						}
						return nil
					})
				})
			}
		}
	})
}

func (n *network) wantTracked(t *testing.T, q quiet, when string) {
	t.Helper()
	known := n.tracked(t, q.opener)
	if known == nil {
		t.Fatalf("%s: conntrack has no entry for %s", when, q.opener)
	}
	if state := stateOf(known); state != tcpEstablished {
		t.Errorf("%s: conntrack state: got %d, want %d", when, state, tcpEstablished)
	}
}
