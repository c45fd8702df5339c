// Package probe finds the nodes on a link of this host to and from which the network passes containers' addresses. Only
// they can be reached without a tunnel: clouds and switches may drop addresses that they do not know.
//
// A probe is a datagram between the first addresses of two nodes' podCIDRs, which no container has. Its gateway is the
// other node, as for direct routes. Two nodes must change between direct routes and the tunnel together, else strict reverse
// path filters drop the packets.
//
// So each of them has a lease. A reply has the time that is left of the other node's lease, and renews this node's: until one
// interval after the end of the other's, four intervals at most. Routes are direct while more than one interval is left.
// Whatever packets are lost, the direct routes of two nodes end within one interval of each other, and neither node begins
// while the questions of one get no reply.
//
// Only replies to this node's last question count, because everybody on the link can send other messages under the other
// node's address. A question changes nothing. If its sender has the longer lease, this node asks at once.
package probe

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
)

const (
	interval = 2 * time.Second
	pace     = 20 * time.Millisecond // per node: on a link with many nodes, probes are less frequent
	longest  = 4                     // intervals of a lease
)

// Prober sends probes and answers them.
type Prober struct {
	port     uint16
	interval time.Duration
	changed  func()
	listen   func(netip.AddrPort) (socket, error)
	kick     chan struct{} // other targets

	mu      sync.Mutex
	targets map[netip.Addr]*target // by the other node's probe address
	sockets map[netip.Addr]socket
	readers sync.WaitGroup
}

// socket is a *net.UDPConn.
type socket interface {
	ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error)
	WriteToUDPAddrPort([]byte, netip.AddrPort) (int, error)
	Close() error
}

type target struct {
	desired.Probe
	nonce    nonce // of the last question
	lease    time.Time
	isDirect bool
	end      *time.Timer // of isDirect; nil: it has not begun
	lost     time.Time   // when isDirect ended; zero: it has not, or has begun again
}

// New returns a prober that calls changed, from any goroutine, when the result of Proved changes.
func New(port int, changed func()) *Prober {
	listen := func(own netip.AddrPort) (socket, error) { return net.ListenUDP("udp", net.UDPAddrFromAddrPort(own)) }
	return &Prober{
		port: uint16(port), interval: interval, changed: changed, listen: listen, kick: make(chan struct{}, 1),
		targets: map[netip.Addr]*target{}, sockets: map[netip.Addr]socket{},
	}
}

// Set sets the nodes to probe. It keeps the results of nodes that stay.
func (p *Prober) Set(probes []desired.Probe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := make(map[netip.Addr]*target, len(probes))
	isNew := len(probes) != len(p.targets)
	for _, probe := range probes {
		if old, known := p.targets[probe.Peer]; known && old.Probe == probe {
			next[probe.Peer] = old
			continue
		}
		next[probe.Peer], isNew = &target{Probe: probe, nonce: newNonce()}, true
	}
	p.targets = next
	if isNew {
		select {
		case p.kick <- struct{}{}:
		default:
		}
	}
}

// Proved returns the addresses of nodes that can be reached directly, and since when others that could be are not.
func (p *Prober) Proved() (proved map[netip.Addr]bool, lost map[netip.Addr]time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	proved, lost = map[netip.Addr]bool{}, map[netip.Addr]time.Time{}
	for _, t := range p.targets {
		if t.isDirect {
			proved[t.Remote] = true
		} else if !t.lost.IsZero() {
			lost[t.Remote] = t.lost
		}
	}
	return proved, lost
}

// Run sends probes until ctx is done.
func (p *Prober) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer p.readers.Wait()
	defer p.closeSockets()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-p.kick:
		}
		timer.Reset(p.round())
	}
}

// round probes all nodes, and returns the time until the next round.
func (p *Prober) round() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.openSockets()
	for _, t := range p.targets {
		t.nonce = newNonce()
		p.ask(t, t.left())
	}
	return p.span()
}

// span returns the time between rounds. It needs the lock.
func (p *Prober) span() time.Duration { return max(p.interval, time.Duration(len(p.targets))*pace) }

// left returns what is left of the lease.
func (t *target) left() time.Duration { return max(0, time.Until(t.lease)) }

// ask sends the last question, once more if it has been sent. An error counts as a lost probe. It needs the lock.
func (p *Prober) ask(t *target, left time.Duration) {
	p.send(t, message{isQuestion: true, left: left, nonce: t.nonce})
}

func (p *Prober) send(t *target, m message) {
	if socket := p.sockets[t.Own]; socket != nil {
		_, _ = socket.WriteToUDPAddrPort(m.encode(), netip.AddrPortFrom(t.Peer, p.port))
	}
}

// renew renews the lease by a reply that has what was left of the other node's. It needs the lock.
func (p *Prober) renew(t *target, left time.Duration) {
	isFirst, wasDirect := t.left() == 0, t.isDirect
	joins := !t.isDirect && left > p.span() // the other node is direct
	if !t.isDirect && !joins && time.Since(t.lost) < longest*p.span() {
		return // replies that arrive one by one must not begin and end it all the time
	}
	if !joins { // else both end at the same time
		left = min(left+p.span(), longest*p.span())
	}
	t.lease = time.Now().Add(left)
	p.judge(t)
	if isFirst || (t.isDirect && !wasDirect) {
		p.ask(t, t.left())
	}
}

// judge begins or ends direct routes by the lease, and waits for its end. It needs the lock.
func (p *Prober) judge(t *target) {
	rest := t.left() - p.span()
	if isDirect := rest > 0; isDirect != t.isDirect {
		t.isDirect, t.lost = isDirect, time.Time{}
		if !isDirect { // the other node must not begin by what is left
			t.lost, t.lease = time.Now(), time.Time{}
		}
		p.changed()
	}
	switch {
	case !t.isDirect:
	case t.end == nil:
		t.end = time.AfterFunc(rest, func() { p.expire(t) })
	default:
		t.end.Reset(rest)
	}
}

func (p *Prober) expire(t *target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.targets[t.Peer] == t {
		p.judge(t)
	}
}

// openSockets opens missing sockets, as soon as their addresses exist, and closes unused ones. It needs the lock.
func (p *Prober) openSockets() {
	needed := map[netip.Addr]bool{}
	for _, t := range p.targets {
		needed[t.Own] = true
	}
	for own, socket := range p.sockets {
		if !needed[own] {
			socket.Close()
			delete(p.sockets, own)
		}
	}
	for own := range needed {
		if p.sockets[own] != nil {
			continue
		}
		socket, err := p.listen(netip.AddrPortFrom(own, p.port))
		if err != nil {
			continue // the next round tries again
		}
		p.sockets[own] = socket
		p.readers.Go(func() { p.read(own, socket) })
	}
}

func (p *Prober) closeSockets() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for own, socket := range p.sockets {
		socket.Close()
		delete(p.sockets, own)
	}
}

// read receives messages until the socket is closed.
func (p *Prober) read(own netip.Addr, socket socket) {
	buffer := make([]byte, 2*messageSize)
	for {
		n, from, err := socket.ReadFromUDPAddrPort(buffer)
		if p.isClosed(own, socket) {
			return
		}
		if m, ok := decode(buffer[:n]); err == nil && ok && from.Port() == p.port {
			p.take(own, from.Addr().Unmap(), m)
		}
	}
}

func (p *Prober) isClosed(own netip.Addr, socket socket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sockets[own] != socket
}

// take answers a question, or records a reply. It ignores messages of addresses that this node does not probe.
func (p *Prober) take(own, from netip.Addr, m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.targets[from]
	switch {
	case t == nil || t.Own != own:
	case m.isQuestion:
		p.judge(t) // its end may be now
		p.send(t, message{left: t.left(), nonce: m.nonce})
		if m.left > 0 && m.left >= t.left() {
			p.ask(t, 0) // 0: so that two nodes do not ask each other without end
		}
	case m.nonce == t.nonce:
		p.renew(t, m.left)
	}
}

// message is a question or a reply.
type message struct {
	isQuestion bool
	left       time.Duration // of the sender's lease
	nonce      nonce         // of the question
}

type nonce [16]byte

func newNonce() (n nonce) {
	_, _ = rand.Read(n[:])
	return n
}

var magic = []byte("ebpfnet probe 2 ")

const (
	messageSize = 16 + 1 + 4 + 16
	tick        = time.Microsecond // of times in messages
)

func (m message) encode() []byte {
	kind := byte(0)
	if m.isQuestion {
		kind = 1
	}
	data := append(bytes.Clone(magic), kind)
	data = binary.BigEndian.AppendUint32(data, uint32(m.left/tick))
	return append(data, m.nonce[:]...)
}

func decode(data []byte) (m message, ok bool) {
	rest, ok := bytes.CutPrefix(data, magic)
	if !ok || len(data) != messageSize {
		return message{}, false
	}
	left := time.Duration(binary.BigEndian.Uint32(rest[1:])) * tick
	return message{isQuestion: rest[0] == 1, left: left, nonce: nonce(rest[5:])}, true
}
