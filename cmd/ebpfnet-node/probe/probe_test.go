package probe

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
)

const timeout = time.Minute // a fault

// node is a prober at an address of lo that runs until the test ends.
type node struct {
	*Prober
	addr    netip.Addr
	changes chan struct{}
	stop    func()
}

func newNode(t *testing.T, port int, last byte) *node {
	t.Helper()
	n := &node{addr: netip.AddrFrom4([4]byte{127, 0, 0, last}), changes: make(chan struct{}, 100)}
	n.Prober = New(port, func() { n.changes <- struct{}{} })
	n.interval = 5 * time.Millisecond
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); n.Run(ctx) }()
	n.stop = func() { stop(); <-ended }
	t.Cleanup(n.stop)
	return n
}

// probes asks other nodes, whose own addresses are stood for by 192.0.2.x.
func (n *node) probes(others ...*node) {
	var probes []desired.Probe
	for _, other := range others {
		probes = append(probes, desired.Probe{Own: n.addr, Peer: other.addr, Remote: remoteOf(other)})
	}
	n.Set(probes)
}

func remoteOf(n *node) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, n.addr.As4()[3]}) }

// freePort returns a UDP port that nobody has on lo.
func freePort(t *testing.T) int {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).Port
}

// await waits until a node trusts another one, or does not.
func (n *node) await(t *testing.T, what string, other *node, want bool) {
	t.Helper()
	for deadline := time.After(timeout); n.Proved()[remoteOf(other)] != want; {
		select {
		case <-n.changes:
		case <-deadline:
			t.Fatalf("%s: %s trusts %s: got %v, want %v", what, n.addr, other.addr, !want, want)
		}
	}
}

// TestProbe has two nodes trust each other, and no longer when one has gone.
func TestProbe(t *testing.T) {
	port := freePort(t)
	a, b, c := newNode(t, port, 2), newNode(t, port, 3), newNode(t, port, 4)
	a.probes(b, c)
	b.probes(a)
	a.await(t, "both ask", b, true)
	b.await(t, "both ask", a, true)
	if a.Proved()[remoteOf(c)] {
		t.Error("a node that does not ask is trusted")
	}
	b.stop()
	a.await(t, "one has gone", b, false)
	again := newNode(t, port, 3)
	again.probes(a)
	a.await(t, "it is back", b, true)
	again.probes()
	a.await(t, "it has another mode", b, false)
}

// TestOneDirection trusts no node that answers without being answered itself.
func TestOneDirection(t *testing.T) {
	p := New(1, func() { t.Error("got a change, want none") })
	peer := netip.MustParseAddr("10.244.2.0")
	p.Set([]desired.Probe{{Own: netip.MustParseAddr("10.244.1.0"), Peer: peer, Remote: netip.MustParseAddr("192.0.2.2")}})
	own := p.targets[peer].Own
	p.take(own, peer, message{isQuestion: true, hears: false})
	p.ask(p.targets[peer])
	p.take(own, peer, message{nonce: nonce{1}})                          // to no question
	p.take(own, netip.MustParseAddr("10.244.3.0"), message{hears: true}) // of a stranger
	if p.targets[peer].heard {
		t.Error("heard of the peer, want nothing: that was no answer to the question")
	}
	p.take(own, peer, message{nonce: p.targets[peer].nonce, hears: true})
	if !p.targets[peer].heard || len(p.Proved()) != 0 {
		t.Errorf("got heard %v, proved %v, want true and nothing", p.targets[peer].heard, p.Proved())
	}
}

// TestDecode takes only whole messages.
func TestDecode(t *testing.T) {
	want := message{isQuestion: true, hears: true, nonce: nonce{1, 2, 3}}
	data := want.encode()
	if got, ok := decode(data); !ok || got != want {
		t.Errorf("got %+v, %v, want %+v", got, ok, want)
	}
	for _, bad := range [][]byte{nil, data[:len(data)-1], append(data, 0), make([]byte, len(data))} {
		if got, ok := decode(bad); ok {
			t.Errorf("%q: got %+v, want nothing", bad, got)
		}
	}
}
