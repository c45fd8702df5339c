package probe

import (
	"context"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
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

func (n *node) proves(other *node) bool {
	proved, _ := n.Proved()
	return proved[remoteOf(other)]
}

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
	for deadline := time.After(timeout); n.proves(other) != want; {
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
	if a.proves(c) {
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

// datagram is one on a link of the test's.
type datagram struct {
	data []byte
	from netip.AddrPort
}

// link is a network without sockets, for synctest. It loses what drops chooses.
type link struct {
	mu    sync.Mutex
	ports map[netip.AddrPort]*port
	drops func(from netip.AddrPort, data []byte) bool
}

// port is a socket of a node on a link.
type port struct {
	*link
	own    netip.AddrPort
	queue  chan datagram
	closed chan struct{}
}

func (l *link) listen(own netip.AddrPort) (socket, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ports[own] = &port{l, own, make(chan datagram, 1000), make(chan struct{})}
	return l.ports[own], nil
}

func (l *link) send(data []byte, from, to netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if receiver := l.ports[to]; receiver != nil && !l.drops(from, data) {
		receiver.queue <- datagram{data, from}
	}
}

func (p *port) WriteToUDPAddrPort(data []byte, to netip.AddrPort) (int, error) {
	p.send(data, p.own, to)
	return len(data), nil
}

func (p *port) ReadFromUDPAddrPort(buffer []byte) (int, netip.AddrPort, error) {
	select {
	case d := <-p.queue:
		return copy(buffer, d.data), d.from, nil
	case <-p.closed:
		return 0, netip.AddrPort{}, net.ErrClosed
	}
}

func (p *port) Close() error { close(p.closed); return nil }

// pair is two nodes on a link, and a host that does not see their packets.
type pair struct {
	*link
	addrs [2]netip.AddrPort
	nodes [2]*Prober
}

// startPair starts the nodes one after the other.
func startPair(ctx context.Context, drops func(isFirst bool, data []byte) bool) *pair {
	p := &pair{link: &link{ports: map[netip.AddrPort]*port{}}}
	p.addrs = [2]netip.AddrPort{netip.MustParseAddrPort("10.0.1.0:1"), netip.MustParseAddrPort("10.0.2.0:1")}
	p.drops = func(from netip.AddrPort, data []byte) bool { return drops(from == p.addrs[0], data) }
	for i, own := range p.addrs {
		p.nodes[i] = New(1, func() {})
		p.nodes[i].listen = p.listen
		p.nodes[i].Set([]desired.Probe{{Own: own.Addr(), Peer: p.addrs[1-i].Addr(), Remote: p.addrs[1-i].Addr()}})
		go p.nodes[i].Run(ctx)
		time.Sleep(interval / 3) // synctest's clock, as below
	}
	return p
}

func (p *pair) isDirect(i int) bool {
	proved, _ := p.nodes[i].Proved()
	return proved[p.addrs[1-i].Addr()]
}

// forge sends questions and replies to both, under the other's address.
func (p *pair) forge() {
	for i, to := range p.addrs {
		for _, isQuestion := range []bool{true, false} {
			for _, left := range []time.Duration{0, time.Hour} {
				p.send(message{isQuestion, left, newNonce()}.encode(), p.addrs[1-i], to)
			}
		}
	}
}

// TestNodesAgree has two nodes in different modes for an interval at most, whatever is lost and whatever a host sends that
// does not see their packets. It cannot keep them from direct routes.
func TestNodesAgree(t *testing.T) {
	const rounds, step, forges = 300, 10 * time.Millisecond, 50 * time.Millisecond
	random := rand.New(rand.NewPCG(1, 2))
	for _, test := range []struct {
		name     string
		drops    func(isFirst bool, data []byte) bool
		isForged bool
		want     string
	}{
		{"nothing lost", func(bool, []byte) bool { return false }, false, "direct"},
		{"a forging host", func(bool, []byte) bool { return false }, true, "direct"},
		{"some lost", func(bool, []byte) bool { return random.IntN(3) == 0 }, false, "both"},
		{"most lost", func(bool, []byte) bool { return random.IntN(4) > 0 }, true, "both"},
		{"most of one lost", func(isFirst bool, _ []byte) bool { return isFirst && random.IntN(3) > 0 }, false, "both"},
		{"questions of one lost", func(isFirst bool, data []byte) bool { return isFirst && data[len(magic)] == 1 }, true, "tunnel"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(context.Background())
				defer func() { stop(); synctest.Wait() }()
				p := startPair(ctx, test.drops)
				var differ time.Duration
				seen := map[bool]bool{} // modes of the first
				for at := time.Duration(0); at < rounds*interval; at += step {
					if test.isForged && at%forges == 0 {
						p.forge()
					}
					time.Sleep(step)
					synctest.Wait()
					if differ += step; p.isDirect(0) == p.isDirect(1) {
						differ = 0
					}
					if differ > interval+step {
						t.Fatalf("after %v: got different modes for %v, want %v at most", at, differ, interval)
					}
					seen[p.isDirect(0)] = true
				}
				if want := (map[bool]bool{true: test.want != "tunnel", false: test.want != "direct"}); seen[true] != want[true] || seen[false] != want[false] {
					t.Errorf("got direct: %v, want %v", seen, want)
				}
			})
		})
	}
}

// TestDecode takes only whole messages.
func TestDecode(t *testing.T) {
	want := message{isQuestion: true, left: 1500 * time.Millisecond, nonce: nonce{1, 2, 3}}
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
