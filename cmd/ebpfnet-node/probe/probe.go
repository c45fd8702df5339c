// Package probe finds the nodes on a link of this host to and from which the network passes containers' addresses. Only
// they can be reached without a tunnel: clouds and switches may drop addresses that they do not know.
//
// A probe is a datagram between the first addresses of two nodes' podCIDRs, which no container has. Its gateway is the
// other node, as for direct routes. Two nodes use direct routes when both have received a reply, so they change at the
// same time, and strict reverse path filters accept the packets.
package probe

import (
	"bytes"
	"context"
	"crypto/rand"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
)

const (
	interval = 2 * time.Second
	pace     = 20 * time.Millisecond // per node: on a link with many nodes, probes are less frequent
	misses   = 3                     // in a row, after which a node counts as unreachable
)

// Prober sends probes and answers them.
type Prober struct {
	port     uint16
	interval time.Duration
	changed  func()
	kick     chan struct{} // other targets

	mu      sync.Mutex
	targets map[netip.Addr]*target // by the other node's probe address
	sockets map[netip.Addr]*net.UDPConn
	readers sync.WaitGroup
}

// target is a node to probe.
type target struct {
	desired.Probe
	nonce    nonce
	answered bool // the last probe
	missed   int
	heard    bool // the node has replied
	hears    bool // the node reports that this node has replied
}

func (t *target) proved() bool { return t.heard && t.hears }

// New returns a prober that calls changed, from any goroutine, when the result of Proved changes.
func New(port int, changed func()) *Prober {
	return &Prober{
		port: uint16(port), interval: interval, changed: changed, kick: make(chan struct{}, 1),
		targets: map[netip.Addr]*target{}, sockets: map[netip.Addr]*net.UDPConn{},
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
		next[probe.Peer], isNew = &target{Probe: probe}, true
	}
	p.targets = next
	if isNew {
		select {
		case p.kick <- struct{}{}:
		default:
		}
	}
}

// Proved returns the addresses of nodes that can be reached directly.
func (p *Prober) Proved() map[netip.Addr]bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	proved := map[netip.Addr]bool{}
	for _, t := range p.targets {
		if t.proved() {
			proved[t.Remote] = true
		}
	}
	return proved
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
		if !t.answered {
			t.missed++
		}
		if t.missed >= misses {
			p.update(t, func() { t.heard = false })
		}
		p.ask(t)
	}
	return max(p.interval, time.Duration(len(p.targets))*pace)
}

// update makes a change, and calls changed if it changes the result of Proved. It needs the lock.
func (p *Prober) update(t *target, change func()) {
	before := t.proved()
	if change(); t.proved() != before {
		p.changed()
	}
}

// ask sends a probe. An error counts as a lost probe. It needs the lock.
func (p *Prober) ask(t *target) {
	_, _ = rand.Read(t.nonce[:])
	t.answered = false
	p.send(t, message{isQuestion: true, hears: t.heard, nonce: t.nonce})
}

func (p *Prober) send(t *target, m message) {
	if socket := p.sockets[t.Own]; socket != nil {
		_, _ = socket.WriteToUDPAddrPort(m.encode(), netip.AddrPortFrom(t.Peer, p.port))
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
		socket, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(own, p.port)))
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
func (p *Prober) read(own netip.Addr, socket *net.UDPConn) {
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

func (p *Prober) isClosed(own netip.Addr, socket *net.UDPConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sockets[own] != socket
}

// take answers a probe, or records a reply. It ignores messages of addresses that this node does not probe.
func (p *Prober) take(own, from netip.Addr, m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.targets[from]
	switch {
	case t == nil || t.Own != own:
	case m.isQuestion:
		p.update(t, func() { t.hears = m.hears })
		p.send(t, message{hears: t.heard, nonce: m.nonce})
	case m.nonce == t.nonce && !t.answered:
		t.answered, t.missed = true, 0
		if isNew := !t.heard; isNew {
			p.update(t, func() { t.heard = true })
			p.ask(t) // reports it to the other node at once
		}
	}
}

// message is a probe or a reply.
type message struct {
	isQuestion bool
	hears      bool // the sender has received a reply
	nonce      nonce
}

type nonce [16]byte

var magic = []byte("ebpfnet probe 1 ")

const messageSize = 16 + 2 + 16

func (m message) encode() []byte {
	flag := func(b bool) byte {
		if b {
			return 1
		}
		return 0
	}
	return append(append(bytes.Clone(magic), flag(m.isQuestion), flag(m.hears)), m.nonce[:]...)
}

func decode(data []byte) (m message, ok bool) {
	rest, ok := bytes.CutPrefix(data, magic)
	if !ok || len(data) != messageSize {
		return message{}, false
	}
	return message{isQuestion: rest[0] == 1, hears: rest[1] == 1, nonce: nonce(rest[2:])}, true
}
