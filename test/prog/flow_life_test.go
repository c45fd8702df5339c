package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestExpiredFlowLosesPort has another flow on the first candidate, idle for a little more or
// less than the timeout of its state.
func TestExpiredFlowLosesPort(t *testing.T) {
	const slack = 10 * time.Second // more than a test takes
	h := newHost(t)
	for _, tc := range []struct {
		on      []proto
		states  bpf.FlowState
		timeout time.Duration
	}{
		{on: []proto{tcp}, timeout: 120 * time.Second},
		{on: []proto{tcp}, states: replied, timeout: 5 * 24 * time.Hour},
		{on: []proto{tcp}, states: replied | fin, timeout: 120 * time.Second},
		{on: []proto{tcp}, states: replied | finReply, timeout: 120 * time.Second},
		{on: []proto{tcp}, states: fin, timeout: 120 * time.Second},
		{on: []proto{udp}, timeout: 30 * time.Second},
		{on: []proto{udp}, states: replied, timeout: 120 * time.Second},
		{on: []proto{echo}, timeout: 30 * time.Second},
		{on: []proto{echo}, states: replied, timeout: 30 * time.Second},
	} {
		for _, s := range (row{on: tc.on}).scenes() {
			t.Run(s.name+" "+string(s.proto)+" "+stateName(tc.states), func(t *testing.T) {
				candidates := h.candidates(t, s, outgoing)
				for idle, want := range map[time.Duration]uint16{
					tc.timeout - slack: candidates[1],
					tc.timeout + slack: candidates[0],
				} {
					s.star = candidates[0]
					old := snat("remote:80", "node:*", "pod2:5000").state(tc.states).idleFor(idle)
					if err := h.reset(); err != nil {
						t.Fatal(err)
					}
					if err := h.fill(s, nil, []flow{old}); err != nil {
						t.Fatal(err)
					}
					if got := h.masquerade(t, s, outgoing); got != want {
						t.Errorf("idle for %s: port is %d, want %d", idle, got, want)
					}
					holder := old
					if want == candidates[0] {
						holder = snat("remote:80", "node:*", "pod:4000")
					}
					if err := h.checkFlow(s, holder); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

func stateName(states bpf.FlowState) string {
	name := "unreplied"
	if states&replied != 0 {
		name = "replied"
	}
	if states&fin != 0 {
		name += " fin"
	}
	if states&finReply != 0 {
		name += " fin-reply"
	}
	return name
}

// checkFlow wants flows to have an entry, among others.
func (h *host) checkFlow(s scene, want flow) error {
	var got bpf.Flow
	key, value := want.wire(s)
	if err := h.flows().Lookup(&key, &got); err != nil {
		return err
	}
	value.LastSeen = got.LastSeen
	if got != value {
		return fmt.Errorf("flow %+v is %+v, want %+v", key, got, value)
	}
	return nil
}

// TestFlowState sends packets of a known flow, and checks its state.
func TestFlowState(t *testing.T) {
	const ack = testenv.ACK
	h := newHost(t)
	idle := 15 * time.Second
	for _, tc := range []struct {
		name   string
		before bpf.FlowState
		flags  uint8
		reply  bool
		after  bpf.FlowState
	}{
		{name: "the pod sends", flags: ack, after: 0},
		{name: "the remote replies", flags: ack, reply: true, after: replied},
		{name: "the pod sends again", before: replied, flags: ack, after: replied},
		{name: "the pod sends FIN", before: replied, flags: testenv.FIN | ack, after: replied | fin},
		{name: "the remote sends FIN", before: replied, flags: testenv.FIN | ack, reply: true, after: replied | finReply},
		{name: "the pod sends FIN, too", before: replied | finReply, flags: testenv.FIN | ack, after: replied | ended},
		{name: "the remote sends FIN, too", before: replied | fin, flags: testenv.FIN | ack, reply: true, after: replied | ended},
		{name: "the pod sends RST", before: replied, flags: testenv.RST, after: replied | reset},
		{name: "the remote refuses with RST", flags: testenv.RST | ack, reply: true, after: replied | reset},
		{name: "the pod goes on after a RST that it ignored", before: replied | reset, flags: ack, after: replied},
		{name: "the remote goes on after a RST that it ignored", before: replied | reset, flags: ack, reply: true, after: replied},
		{name: "the pod goes on after both FINs", before: replied | ended, flags: ack, after: replied | ended},
		{name: "the pod opens the connection anew", before: replied | ended, flags: testenv.SYN, after: 0},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(tc.name+" "+s.name, func(t *testing.T) {
				s.star = h.candidates(t, s, outgoing)[0]
				r := row{
					flows: []flow{snat("remote:80", "node:*", "pod:4000").state(tc.before).idleFor(idle)},
					in:    outgoing, out: "node:* > remote:80",
					edit:  func(p *testenv.Packet) { p.TCPFlags = tc.flags },
					after: []flow{snat("remote:80", "node:*", "pod:4000").state(tc.after)},
				}
				program := bpf.ProgToUplink
				if tc.reply {
					program = bpf.ProgFromUplink
					r.in, r.out, r.reply = "remote:80 > node:*", "remote:80 > pod:4000", true
				}
				if err := h.check(program, s, r); err != nil {
					t.Error(err)
				}
				var backup []flow
				if tc.after&replied != 0 && tc.after&ended != ended {
					backup = r.after
				}
				if err := checkEntries(h.flowsBackup(), s, backup); err != nil {
					t.Errorf("flows_backup: %v", err)
				}
			})
		}
	}
}
