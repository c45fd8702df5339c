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

// The flow whose port the tests below are about, and others of the same remote.
const (
	outgoing = "pod:4000 > remote:80"
	stranger = uint64(0xbad)
)

// masqRow is a state of the candidates, the ports that a flow can get, in the
// order in which the program tries them.
type masqRow struct {
	name  string
	on    []proto
	flows func(c []uint16) map[uint16]flow // by local port
	ports func(c []uint16) []uint16        // host ports of the node's address
	any   bool                             // host ports of any address
	want  func(c []uint16) uint16          // 0: dropped
}

func TestMasqueradePort(t *testing.T) {
	h := newHost(t)
	ours := out("remote:80", "node:*", "pod:4000").unused(10 * time.Second)
	others := out("remote:80", "node:*", "pod2:5000").unused(10 * time.Second)
	take := func(n int, f flow) func([]uint16) map[uint16]flow {
		return func(c []uint16) map[uint16]flow {
			taken := map[uint16]flow{}
			for _, port := range c[:min(n, len(c))] {
				taken[port] = f
			}
			return taken
		}
	}
	nth := func(i int) func([]uint16) uint16 { return func(c []uint16) uint16 { return c[i] } }
	none := func([]uint16) uint16 { return 0 }
	all := 1 << 16

	for _, r := range []masqRow{
		{name: "the first candidate is free", want: nth(0)},
		{name: "our entry", flows: take(1, ours), want: nth(0)},
		{name: "an entry of another flow", flows: take(1, others), want: nth(1)},
		{name: "another pod with our port", flows: take(1, out("remote:80", "node:*", "pod2:4000")), want: nth(1)},
		{name: "our pod with another port", flows: take(1, out("remote:80", "node:*", "pod:4001")), want: nth(1)},
		{name: "entries of an owner that is gone", flows: take(all, ours.of(stranger)), want: nth(0)},
		{name: "seven are taken", flows: take(7, others), want: nth(7)},
		{name: "all are taken", flows: take(all, others), want: none},
		{name: "another remote has them all", flows: take(all, out("remote2:80", "node:*", "pod2:5000")), want: nth(0)},
		{name: "another port of the remote has them all", on: ported, flows: take(all, out("remote:81", "node:*", "pod2:5000")), want: nth(0)},
		{name: "another address of ours has them all", flows: take(all, out("remote:80", "node2:*", "pod2:5000")), want: nth(0)},
		{
			name: "our entry behind a candidate that is free", want: nth(2),
			flows: func(c []uint16) map[uint16]flow { return map[uint16]flow{c[2]: ours} },
		},
		{
			name: "our entry behind others", want: nth(3),
			flows: func(c []uint16) map[uint16]flow {
				return map[uint16]flow{c[0]: others, c[1]: others, c[3]: ours}
			},
		},
		{
			name: "our entry is idle for long", flows: take(1, ours.unused(24*time.Hour)), want: nth(0),
		},
		{
			name: "the last one is free", want: func(c []uint16) uint16 { return c[len(c)-1] },
			flows: func(c []uint16) map[uint16]flow { return take(len(c)-1, others)(c) },
		},
		{
			name: "an entry from the future, by another CPU's clock", want: nth(1),
			flows: take(1, others.unused(-3*time.Second)),
		},
		{name: "a host port", on: ported, ports: func(c []uint16) []uint16 { return c[:1] }, want: nth(1)},
		{
			name: "a host port of any address", on: ported, any: true, want: nth(1),
			ports: func(c []uint16) []uint16 { return c[:1] },
		},
		{name: "a host port does not matter to echo", on: []proto{echo}, ports: func(c []uint16) []uint16 { return c[:1] }, want: nth(0)},
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
	if err := h.reset(); err != nil {
		t.Fatal(err)
	}
	taken := map[uint16]flow{}
	if r.flows != nil {
		taken = r.flows(candidates)
	}
	for local, f := range taken {
		s.star = local
		if err := h.fill(s, nil, []flow{f}); err != nil {
			t.Fatal(err)
		}
	}
	if r.ports != nil {
		name := "node"
		if r.any {
			name = "any"
		}
		for _, s.star = range r.ports(candidates) {
			if err := h.fill(s, []port{{host: name + ":*", to: "pod2:80"}}, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	before, err := contents[bpf.FlowKey, bpf.Flow](h.flows())
	if err != nil {
		t.Fatal(err)
	}

	want, got := r.want(candidates), h.masquerade(t, s, outgoing)
	if got != want {
		t.Errorf("port is %d, want %d; candidates are %v", got, want, candidates)
	}
	reason := ""
	if want == 0 {
		reason = "no port"
	}
	if err := h.checkCounters(reason, len(s.packet(outgoing, false).MustBuild())); err != nil {
		t.Error(err)
	}
	// Only the entry of this flow may have changed.
	after, err := contents[bpf.FlowKey, bpf.Flow](h.flows())
	if err != nil {
		t.Fatal(err)
	}
	s.star = want
	own, _ := out("remote:80", "node:*", "pod:4000").wire(s)
	delete(before, own)
	delete(after, own)
	if !equal(before, after) {
		t.Errorf("other flows are %+v, were %+v", after, before)
	}
}

// TestMasqueradeTries has a flow looked for behind those candidates alone that some flow has
// tried: with the first two taken, the third is noted, and those after it are not looked at.
func TestMasqueradeTries(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: ported}).scenes() {
		t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
			candidates := h.candidates(t, s, outgoing)
			reset := func(taken ...flow) {
				t.Helper()
				errs := []error{h.reset()}
				for i, f := range taken {
					s.star = candidates[i]
					errs = append(errs, h.fill(s, nil, []flow{f}))
				}
				if err := errors.Join(errs...); err != nil {
					t.Fatal(err)
				}
			}
			others, ours := out("remote:80", "node:*", "pod2:5000"), out("remote:80", "node:*", "pod:4000")
			want := func(what string, i int) {
				t.Helper()
				if got := h.masquerade(t, s, outgoing); got != candidates[i] {
					t.Errorf("%s: port is %d, want %d; candidates are %v", what, got, candidates[i], candidates)
				}
			}
			if err := h.setTried(0); err != nil {
				t.Fatal(err)
			}
			defer h.setTried(1)
			reset(others, others)
			want("a new flow", 2)
			if got := h.tried(t); got != 2 {
				t.Errorf("%d candidates are noted, want 2", got)
			}
			h.forget(t, s, candidates[0])
			want("the same with the first one free again", 2)
			reset(others, others, others, ours)
			h.forget(t, s, candidates[0])
			want("one behind what was tried", 0)
		})
	}
}

// tried counts the candidates, of all groups, that flows have tried.
func (h *host) tried(t *testing.T) (sum int) {
	t.Helper()
	all, err := contents[uint32, bpf.MasqProbes](h.programs.Maps[bpf.MapMasqProbes])
	if err != nil {
		t.Fatal(err)
	}
	for _, group := range all {
		for _, was := range group.Used {
			sum += int(was)
		}
	}
	return sum
}

// forget removes the flow that has a port.
func (h *host) forget(t *testing.T, s scene, port uint16) {
	t.Helper()
	s.star = port
	key, _ := out("remote:80", "node:*", "pod2:5000").wire(s)
	if err := h.flows().Delete(key); err != nil {
		t.Fatal(err)
	}
}

// masquerade sends a packet out, and returns the port that it leaves with, or 0.
func (h *host) masquerade(t testing.TB, s scene, text string) uint16 {
	t.Helper()
	verdict, result, err := h.runInside(bpf.ProgToUplink, s.packet(text, false).MustBuild())
	if err != nil {
		t.Fatal(err)
	}
	if verdict == verdictDrop {
		return 0
	}
	p, err := testenv.Decode(result)
	if err != nil {
		t.Fatal(err)
	}
	return s.sourcePort(p)
}

// candidates finds out which ports a flow can get, and in which order: by giving
// each one that it gets to a stranger, until it gets none.
func (h *host) candidates(t testing.TB, s scene, text string) []uint16 {
	t.Helper()
	if err := h.reset(); err != nil {
		t.Fatal(err)
	}
	const probes = 32 // MASQ_PROBES in masq.h; two of them may be the same port
	var ports []uint16
	for s.star = h.masquerade(t, s, text); s.star != 0; s.star = h.masquerade(t, s, text) {
		if slices.Contains(ports, s.star) || !inRange(s.star) || len(ports) > probes {
			t.Fatalf("candidate %d after %v", s.star, ports)
		}
		ports = append(ports, s.star)
		if err := h.fill(s, nil, []flow{out("remote:80", "node:*", "pod2:1")}); err != nil {
			t.Fatal(err)
		}
	}
	if len(ports) < probes-4 {
		t.Fatalf("only %d candidates: %v", len(ports), ports)
	}
	return ports
}

// TestMasqueradeSkipsSockets has a socket of the host on the first candidate.
func TestMasqueradeSkipsSockets(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		name string
		at   string // the address that the socket is bound to
		on   proto
		next bool // the first candidate is skipped
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
					if err := h.reset(); err != nil {
						t.Fatal(err)
					}
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
	if err != nil {
		t.Fatal(err)
	}
	return socket
}
