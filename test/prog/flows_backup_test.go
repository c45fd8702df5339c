package prog

import (
	"errors"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestFlowsBackup has connections that flows has lost, but flows_backup has not: their
// packets are translated as before.
func TestFlowsBackup(t *testing.T) {
	masqueraded := []flow{snat("remote:80", "node:20000", "pod:4000").established()}
	second, third := []flow{snat("remote:80", "node:20001", "pod2:4000").established()}, []flow{snat("remote:80", "node:20002", "pod2:4001").established()}
	replies := []flow{dnat("remote:5000", "pod:80", "node2:8080").established()}
	asNode := []flow{dnat("remote:5000", "pod:80", "node:8080").with(replied | pickedUp)}
	toPod := []hostPort{{host: "any:8080", to: "pod:80"}}
	for program, rows := range map[string][]row{
		bpf.ProgFromUplink: {
			{
				name: "from the remote", backup: masqueraded, in: "remote:80 > node:20000", edit: isACK,
				out: "remote:80 > pod:4000", after: masqueraded,
			},
			{
				name: "behind another flow's entry in the bucket", backup: slices.Concat(second, masqueraded), in: "remote:80 > node:20000",
				edit: isACK, out: "remote:80 > pod:4000", after: masqueraded,
			},
			{
				name: "behind the entries of two flows", backup: slices.Concat(second, third, masqueraded), in: "remote:80 > node:20000",
				edit: isACK, out: "remote:80 > pod:4000", after: masqueraded,
			},
			{name: "from another port of the remote", backup: masqueraded, in: "remote:81 > node:20000", edit: isACK},
			{name: "from the remote, after both sides have closed", in: "remote:80 > node:20000", edit: isACK},
		},
		bpf.ProgToUplink: {
			{
				name: "a reply leaves from the address that the client used", ports: toPod, backup: replies, in: "pod:80 > remote:5000", edit: isACK,
				out: "node2:8080 > remote:5000", after: replies,
			},
			{
				name: "from another port of the pod", ports: toPod, backup: replies, in: "pod:81 > remote:5000", edit: isACK,
				out: "node:* > remote:5000", after: []flow{snat("remote:5000", "node:*", "pod:81").provisional()},
			},
			{
				name: "of two host ports, the one that the client used", backup: []flow{dnat("remote:5000", "plain:80", "node:8081").established()},
				ports: []hostPort{{host: "any:8080", to: "plain:80"}, {host: "any:8081", to: "plain:80"}}, in: "plain:80 > remote:5000", edit: isACK,
				out: "node:8081 > remote:5000", after: []flow{dnat("remote:5000", "plain:80", "node:8081").established()},
			},
			{
				name: "an entry of the address's former owner", ports: toPod, in: "pod:80 > remote:5000", edit: isACK,
				backup: []flow{replies[0].ownedBy(formerOwner)}, out: "node:8080 > remote:5000", after: asNode,
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

// TestFlowsBackupReservesPort has connections that flows has lost: their port stays theirs.
func TestFlowsBackupReservesPort(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		name  string
		flags uint8
		other flow // has the first candidate
		want  int  // candidate
	}{
		{name: "our own", flags: testenv.ACK, other: snat("remote:80", "node:*", "pod:4000"), want: 0},
		{name: "our own, opened anew", flags: testenv.SYN, other: snat("remote:80", "node:*", "pod:4000"), want: 0},
		{name: "another flow's", flags: testenv.SYN, other: snat("remote:80", "node:*", "pod2:5000"), want: 1},
		{name: "another flow's, expired", flags: testenv.SYN, other: snat("remote:80", "node:*", "pod2:5000").idleFor(6 * day), want: 0},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(tc.name+" "+s.name, func(t *testing.T) {
				candidates := h.candidates(t, s, outgoing)
				s.star = candidates[0]
				if err := errors.Join(h.reset(), h.fillBackup(s, []flow{tc.other.established()})); err != nil {
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
