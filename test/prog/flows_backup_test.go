package prog

import (
	"errors"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestEstablished has connections whose entries in flows are lost, but not those in
// established: each packet of them does what it would have done.
func TestEstablished(t *testing.T) {
	masqueraded := []flow{out("remote:80", "node:20000", "pod:4000").state(replied)}
	asked := []flow{in("remote:5000", "pod:80", "node2:8080").state(replied)}
	asNode := []flow{in("remote:5000", "pod:80", "node:8080").state(replied)}
	toPod := []port{{host: "any:8080", to: "pod:80"}}
	for program, rows := range map[string][]row{
		bpf.ProgFromUplink: {
			{
				name: "the remote goes on", kept: masqueraded, in: "remote:80 > node:20000", edit: isACK,
				out: "remote:80 > pod:4000", after: masqueraded,
			},
			{name: "another port of the remote", kept: masqueraded, in: "remote:81 > node:20000", edit: isACK},
			{name: "a remote goes on whose connection has ended on both sides", in: "remote:80 > node:20000", edit: isACK},
		},
		bpf.ProgToUplink: {
			{
				name: "an answer to the address that the remote asked", ports: toPod, kept: asked, in: "pod:80 > remote:5000", edit: isACK,
				out: "node2:8080 > remote:5000", after: asked,
			},
			{
				name: "the same from another port of the pod", ports: toPod, kept: asked, in: "pod:81 > remote:5000", edit: isACK,
				out: "node:* > remote:5000", after: []flow{out("remote:5000", "node:*", "pod:81")},
			},
			{
				name: "of two host ports, the one that was asked", kept: []flow{in("remote:5000", "plain:80", "node:8081").state(replied)},
				ports: []port{{host: "any:8080", to: "plain:80"}, {host: "any:8081", to: "plain:80"}}, in: "plain:80 > remote:5000", edit: isACK,
				out: "node:8081 > remote:5000", after: []flow{in("remote:5000", "plain:80", "node:8081").state(replied)},
			},
			{
				name: "an entry of a former owner", ports: toPod, in: "pod:80 > remote:5000", edit: isACK,
				kept: []flow{asked[0].of(stranger)}, out: "node:8080 > remote:5000", after: asNode,
			},
		},
	} {
		t.Run(program, func(t *testing.T) {
			for i := range rows {
				rows[i].on = []proto{tcp}
			}
			runRows(t, program, rows)
		})
	}
}

// TestEstablishedHoldsPort keeps the port of a connection that flows has lost: for the
// connection itself, and from others.
func TestEstablishedHoldsPort(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		name  string
		flags uint8
		other flow // the one that has the first candidate
		want  int  // candidate
	}{
		{name: "ours", flags: testenv.ACK, other: out("remote:80", "node:*", "pod:4000"), want: 0},
		{name: "ours, and we begin anew", flags: testenv.SYN, other: out("remote:80", "node:*", "pod:4000"), want: 0},
		{name: "another's", flags: testenv.SYN, other: out("remote:80", "node:*", "pod2:5000"), want: 1},
		{name: "another's, expired", flags: testenv.SYN, other: out("remote:80", "node:*", "pod2:5000").unused(6 * 24 * time.Hour), want: 0},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(tc.name+" "+s.name, func(t *testing.T) {
				candidates := h.candidates(t, s, outgoing)
				s.star = candidates[0]
				if err := errors.Join(h.reset(), h.keep(s, []flow{tc.other.state(replied)})); err != nil {
					t.Fatal(err)
				}
				s.star = 0
				p := s.packet(outgoing, false)
				p.TCPFlags = tc.flags
				step := hop{program: bpf.ProgToUplink, out: "node:* > remote:80"}
				if _, err := h.hop(&s, p, false, step); err != nil {
					t.Fatal(err)
				}
				if s.star != candidates[tc.want] {
					t.Errorf("port is %d, want candidate %d of %v", s.star, tc.want, candidates)
				}
			})
		}
	}
}
