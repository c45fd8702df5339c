package prog

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The first packet of the masqueraded flow in most tests, and the owner of no endpoint.
const (
	outgoing    = "pod:4000 > remote:80"
	formerOwner = uint64(0xbad)
)

// masqRow has entries on the flow's candidate ports. c has the candidates, in the order in
// which the program probes them.
type masqRow struct {
	name  string
	on    []proto
	flows func(c []uint16) map[uint16]flow // by candidate
	ports func(c []uint16) []uint16        // host ports on the node's address
	any   bool                             // host ports on any address
	want  func(c []uint16) uint16          // 0: dropped
}

func TestMasqueradePort(t *testing.T) {
	h := newHost(t)
	ours := snat("remote:80", "node:*", "pod:4000").idleFor(10 * time.Second)
	others := snat("remote:80", "node:*", "pod2:5000").idleFor(10 * time.Second)
	take := func(n int, f flow) func([]uint16) map[uint16]flow {
		return func(c []uint16) map[uint16]flow {
			taken := map[uint16]flow{}
			for _, port := range c[:min(n, len(c))] {
				taken[port] = f
			}
			return taken
		}
	}
	ended := others.with(replied).in(bpf.FlowTimeWait)
	own := snat("remote:80", "node:*", "pod:5000") // another flow of the same pod
	mixed := func(flows ...flow) func([]uint16) map[uint16]flow {
		return func(c []uint16) map[uint16]flow {
			taken := map[uint16]flow{}
			for i, f := range flows {
				taken[c[i]] = f
			}
			return taken
		}
	}
	allBut := func(i int, f flow) func([]uint16) map[uint16]flow {
		return func(c []uint16) map[uint16]flow {
			taken := take(len(c), others.established())(c)
			taken[c[i]] = f
			return taken
		}
	}
	nth := func(i int) func([]uint16) uint16 { return func(c []uint16) uint16 { return c[i] } }
	none := func([]uint16) uint16 { return 0 }
	all := 1 << 16

	for _, r := range []masqRow{
		{name: "the first candidate is free", want: nth(0)},
		{name: "the flow's own entry", flows: take(1, ours), want: nth(0)},
		{name: "another flow has the first candidate", flows: take(1, others), want: nth(1)},
		{name: "another pod's flow from the same port", flows: take(1, snat("remote:80", "node:*", "pod2:4000")), want: nth(1)},
		{name: "the same pod's flow from another port", flows: take(1, snat("remote:80", "node:*", "pod:4001")), want: nth(1)},
		{name: "entries of an owner without endpoint", flows: take(all, ours.ownedBy(formerOwner)), want: nth(0)},
		{name: "seven are taken", flows: take(7, others), want: nth(7)},
		{name: "all are taken", flows: take(all, others), want: none},
		{name: "all are taken, one by a connection that has ended", on: []proto{tcp}, flows: allBut(5, ended), want: nth(5)},
		{name: "all are taken, one by a connection that was reset", on: []proto{tcp}, flows: allBut(5, others.in(bpf.FlowClose)), want: nth(5)},
		{name: "all are taken by connections that have ended", on: []proto{tcp}, flows: take(all, ended), want: nth(0)},
		{name: "free ports come before those of connections that have ended", on: []proto{tcp}, flows: mixed(ended, ended, ended), want: nth(3)},
		{name: "all are taken, one by a connection that waits for its last ACK", on: []proto{tcp}, flows: allBut(5, others.with(replied).in(bpf.FlowLastACK)), want: nth(5)},
		{name: "all are taken, one by a connection that only the remote has closed", on: []proto{tcp}, flows: allBut(5, others.with(replied).in(bpf.FlowCloseWait)), want: none},
		{
			name: "all are taken, one by the same pod's connection with an unknown RST", on: []proto{tcp}, want: nth(5),
			flows: allBut(5, own.with(replied|bpf.FlowRSTUnknown).in(bpf.FlowEstablished)),
		},
		{
			name: "all are taken, one by another pod's connection with an unknown RST", on: []proto{tcp}, want: none,
			flows: allBut(5, others.with(replied|bpf.FlowRSTUnknown).in(bpf.FlowEstablished)),
		},
		{
			name: "all are taken, one by the same pod's connection with FINs of both sides", on: []proto{tcp}, want: nth(5),
			flows: allBut(5, own.with(replied|bpf.FlowFIN|bpf.FlowFINUnacked).in(bpf.FlowFINWait)),
		},
		{
			name: "all are taken, one by another pod's connection with FINs of both sides", on: []proto{tcp}, want: none,
			flows: allBut(5, others.with(replied|bpf.FlowFIN|bpf.FlowFINUnacked).in(bpf.FlowFINWait)),
		},
		{name: "six are taken by the same pod's connections that have ended", on: []proto{tcp}, flows: take(6, own.with(replied).in(bpf.FlowTimeWait)), want: nth(4)},
		{name: "six are taken by another pod's connections that have ended", on: []proto{tcp}, flows: take(6, ended), want: nth(6)},
		{name: "all are taken by the same pod's questions that were answered", on: []proto{udp}, flows: take(all, own.with(replied).idleFor(4*time.Second)), want: nth(4)},
		{name: "all are taken by the same pod's questions that were answered just now", on: []proto{udp}, flows: take(all, own.with(replied)), want: nth(0)},
		{name: "all are taken by the same pod's questions that were answered just now, and continue", on: []proto{udp}, flows: take(all, own.with(replied|bpf.FlowContinues)), want: none},
		{name: "six are taken by the same pod's questions that were answered just now", on: []proto{udp}, flows: take(6, own.with(replied)), want: nth(6)},
		{name: "all are taken by the same pod's open questions", on: []proto{udp}, flows: take(all, own.idleFor(4*time.Second)), want: none},
		{name: "all are taken by the same pod's idle streams", on: []proto{udp}, flows: take(all, own.with(replied).streaming().idleFor(4*time.Second)), want: nth(0)},
		{name: "all are taken by the same pod's streams, in use", on: []proto{udp}, flows: take(all, own.with(replied).streaming()), want: none},
		{name: "six are taken by the same pod's streams", on: []proto{udp}, flows: take(6, own.with(replied).streaming().idleFor(4*time.Second)), want: nth(6)},
		{name: "all are taken by another pod's questions that were answered", on: []proto{udp}, flows: take(all, others.with(replied)), want: none},
		{name: "all are taken, one by the same pod's open connection", on: []proto{tcp}, flows: allBut(5, own.established()), want: none},
		{name: "all are taken by the host", flows: take(all, claim("remote:80", "node:*").established()), want: none},
		{name: "all are taken for another remote", flows: take(all, snat("remote2:80", "node:*", "pod2:5000")), want: nth(0)},
		{name: "all are taken for another port of the remote", on: withPorts, flows: take(all, snat("remote:81", "node:*", "pod2:5000")), want: nth(0)},
		{name: "all are taken for another masquerading address", flows: take(all, snat("remote:80", "node2:*", "pod2:5000")), want: nth(0)},
		{
			name: "the flow's own entry behind a free candidate", want: nth(2),
			flows: func(c []uint16) map[uint16]flow { return map[uint16]flow{c[2]: ours} },
		},
		{
			name: "the flow's own entry behind other flows", want: nth(3),
			flows: func(c []uint16) map[uint16]flow {
				return map[uint16]flow{c[0]: others, c[1]: others, c[3]: ours}
			},
		},
		{
			name: "the flow's own entry is expired", flows: take(1, ours.idleFor(24*time.Hour)), want: nth(0),
		},
		{
			name: "the last one is free", want: func(c []uint16) uint16 { return c[len(c)-1] },
			flows: func(c []uint16) map[uint16]flow { return take(len(c)-1, others)(c) },
		},
		{
			name: "an entry last seen in the future, by another CPU's clock", want: nth(1),
			flows: take(1, others.idleFor(-3*time.Second)),
		},
		{name: "a host port on the first candidate", on: withPorts, ports: func(c []uint16) []uint16 { return c[:1] }, want: nth(1)},
		{
			name: "a host port on any address", on: withPorts, any: true, want: nth(1),
			ports: func(c []uint16) []uint16 { return c[:1] },
		},
		{name: "a host port on the first candidate, echo", on: []proto{echo}, ports: func(c []uint16) []uint16 { return c[:1] }, want: nth(0)},
	} {
		t.Run(r.name, func(t *testing.T) {
			for _, s := range (row{on: r.on}).scenes() {
				t.Run(s.name+" "+string(s.proto), func(t *testing.T) { h.testMasqPort(t, s, r) })
			}
		})
	}
}

func (h *host) testMasqPort(t *testing.T, s scene, r masqRow) {
	candidates := h.candidates(t, s, outgoing)
	testenv.Must(t, h.reset())
	taken := map[uint16]flow{}
	if r.flows != nil {
		taken = r.flows(candidates)
	}
	for local, f := range taken {
		s.star = local
		testenv.Must(t, h.fill(s, nil, []flow{f}))
	}
	if r.ports != nil {
		name := "node"
		if r.any {
			name = "any"
		}
		for _, s.star = range r.ports(candidates) {
			testenv.Must(t, h.fill(s, []hostPort{{host: name + ":*", to: "pod2:80"}}, nil))
		}
	}
	before, err := h.flows().all()
	testenv.Must(t, err)

	want, got := r.want(candidates), h.masquerade(t, s, outgoing)
	if got != want {
		t.Errorf("port is %d, want %d; candidates are %v", got, want, candidates)
	}
	reason := ""
	if want == 0 {
		reason = "no port"
	}
	testenv.NoError(t, h.checkCounters(reason, len(s.packet(outgoing, false).MustBuild())))
	// No other flow's entry may have changed.
	after, err := h.flows().all()
	testenv.Must(t, err)
	s.star = want
	own, _ := snat("remote:80", "node:*", "pod:4000").wire(s)
	delete(before, own)
	delete(after, own)
	if !equal(before, after) {
		t.Errorf("other flows changed to %+v from %+v", after, before)
	}
}

// TestMovedFlows has a flow that does not get its first candidate. It is found again, and lookups look no further
// than it can be.
func TestMovedFlows(t *testing.T) {
	h := newHost(t)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		candidates := h.candidates(t, s, outgoing)
		reset := func(taken ...flow) {
			t.Helper()
			errs := []error{h.reset()}
			for i, f := range taken {
				s.star = candidates[i]
				errs = append(errs, h.fill(s, nil, []flow{f}))
			}
			testenv.Must(t, errors.Join(errs...))
		}
		others, ours := snat("remote:80", "node:*", "pod2:5000"), snat("remote:80", "node:*", "pod:4000")
		want := func(what string, i int) {
			t.Helper()
			if got := h.masquerade(t, s, outgoing); got != candidates[i] {
				t.Errorf("%s: port is %d, want %d; candidates are %v", what, got, candidates[i], candidates)
			}
		}
		testenv.Must(t, h.setMoved(0))
		defer h.setMoved(longAhead)
		reset(others, others)
		want("new flow", 2)
		if got := h.moved(t); got != 1 {
			t.Errorf("%d flows are recorded, want 1", got)
		}
		h.removeFlow(t, s, candidates[0])
		want("same flow, with the first candidate free again", 2)
		reset(others, others, others, others, others, others, others, others, ours)
		h.removeFlow(t, s, candidates[0])
		want("entry behind the recorded candidates", 0)
	})
}

// removeFlow removes the flow with a masquerading port.
func (h *host) removeFlow(t *testing.T, s scene, port uint16) {
	t.Helper()
	s.star = port
	key, _ := snat("remote:80", "node:*", "pod2:5000").wire(s)
	testenv.Must(t, h.flows().Delete(key))
}

// masquerade runs to_uplink on a flow's first packet, and returns its masquerading port, or 0 if it was dropped.
func (h *host) masquerade(t testing.TB, s scene, text string) uint16 {
	t.Helper()
	return h.masqueradePacket(t, s, s.packet(text, false))
}

func (h *host) masqueradePacket(t testing.TB, s scene, first testenv.Packet) uint16 {
	t.Helper()
	verdict, result, err := h.runInside(bpf.ProgToUplink, first.MustBuild())
	testenv.Must(t, err)
	if verdict == verdictDrop {
		return 0
	}
	p, err := testenv.Decode(result)
	testenv.Must(t, err)
	return s.sourcePort(p)
}

// candidates finds out a flow's candidates in order: it gives each port that the flow gets to
// another flow, until none is left.
func (h *host) candidates(t testing.TB, s scene, text string) []uint16 {
	t.Helper()
	testenv.Must(t, h.reset())
	const probes = 64 // MASQ_CANDIDATES; two of them may be the same port
	var ports []uint16
	for s.star = h.masquerade(t, s, text); s.star != 0; s.star = h.masquerade(t, s, text) {
		if slices.Contains(ports, s.star) || !inRange(s.star) || len(ports) > probes {
			t.Fatalf("candidate %d after %v", s.star, ports)
		}
		ports = append(ports, s.star)
		testenv.Must(t, h.fill(s, nil, []flow{snat("remote:80", "node:*", "pod2:1")}))
	}
	if len(ports) < probes-4 {
		t.Fatalf("only %d candidates: %v", len(ports), ports)
	}
	return ports
}

// TestMasqueradeSkipsSockets binds a socket of the host to the first candidate.
func TestMasqueradeSkipsSockets(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		name string
		at   string // the socket's address
		on   proto
		next bool // the flow gets the second candidate
	}{
		{name: "a listener", at: "node", on: tcp, next: true},
		{name: "a listener on any address", at: "any", on: tcp, next: true},
		{name: "a listener on another address", at: "node2", on: tcp},
		{name: "a UDP socket", at: "node", on: udp, next: true},
		{name: "a UDP socket on any address", at: "any", on: udp, next: true},
		{name: "a UDP socket on another address", at: "node2", on: udp},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, s := range (row{on: []proto{tcp, udp}}).scenes() {
				t.Run("flow "+s.name+" "+string(s.proto), func(t *testing.T) {
					candidates := h.candidates(t, s, outgoing)
					testenv.Must(t, h.reset())
					socket := h.listen(t, tc.on, netip.AddrPortFrom(s.addr(tc.at), candidates[0]))
					defer socket.Close()
					want := candidates[0]
					if tc.next && s.proto == tc.on {
						want = candidates[1]
					}
					if got := h.masquerade(t, s, outgoing); got != want {
						t.Errorf("port is %d, want %d", got, want)
					}
				})
			}
		})
	}
}

func (h *host) listen(t *testing.T, p proto, addr netip.AddrPort) (socket io.Closer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout)
	defer cancel()
	var err error
	if p == tcp {
		socket, err = h.Listen(ctx, addr)
	} else {
		socket, err = h.ListenPacket(ctx, addr)
	}
	testenv.Must(t, err)
	return socket
}
