package prog

import (
	"fmt"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestExpiredFlowLosesPort has another flow on the first candidate, idle for a little more or
// less than the timeout of its state.
func TestExpiredFlowLosesPort(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		name    string
		proto   proto
		old     flow // to another remote: see below
		timeout time.Duration
	}{
		{name: "SYN sent", proto: tcp, timeout: 120 * time.Second},
		{name: "SYN received", proto: tcp, old: flow{tcp: bpf.FlowSYNRecv, flags: replied}, timeout: 60 * time.Second},
		{name: "established", proto: tcp, old: flow{tcp: bpf.FlowEstablished, flags: replied}, timeout: 5 * 24 * time.Hour},
		{name: "FIN wait", proto: tcp, old: flow{tcp: bpf.FlowFINWait, flags: replied}, timeout: 120 * time.Second},
		{name: "close wait", proto: tcp, old: flow{tcp: bpf.FlowCloseWait, flags: replied}, timeout: 60 * time.Second},
		{name: "last ACK", proto: tcp, old: flow{tcp: bpf.FlowLastACK, flags: replied}, timeout: 30 * time.Second},
		{name: "time wait", proto: tcp, old: flow{tcp: bpf.FlowTimeWait, flags: replied}, timeout: 120 * time.Second},
		{name: "close", proto: tcp, old: flow{tcp: bpf.FlowClose, flags: replied}, timeout: 10 * time.Second},
		{name: "stream", proto: udp, old: flow{flags: replied, stream: true}, timeout: 120 * time.Second},
		{name: "unreplied", proto: udp, timeout: 30 * time.Second},
		{name: "replied", proto: udp, old: flow{flags: replied}, timeout: 30 * time.Second},
		{name: "unreplied", proto: echo, timeout: 30 * time.Second},
		{name: "replied", proto: echo, old: flow{flags: replied}, timeout: 30 * time.Second},
	} {
		for _, s := range (row{on: []proto{tc.proto}}).scenes() {
			t.Run(s.name+" "+string(s.proto)+" "+tc.name, func(t *testing.T) {
				candidates := h.candidates(t, s, outgoing)
				slack := min(10*time.Second, tc.timeout/2) // more than a test takes
				for idle, want := range map[time.Duration]uint16{
					tc.timeout - slack: candidates[1],
					tc.timeout + slack: candidates[0],
				} {
					s.star = candidates[0]
					old := snat("remote:80", "node:*", "pod2:5000").with(tc.old.flags).in(tc.old.tcp).idleFor(idle)
					old.stream = tc.old.stream
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

// checkFlow wants flows to have an entry, among others.
func (h *host) checkFlow(s scene, want flow) error {
	var got bpf.Flow
	key, value := want.wire(s)
	if err := h.flows().Lookup(&key, &got); err != nil {
		return err
	}
	if got = untimed(got, value); got != value {
		return fmt.Errorf("flow %+v is %+v, want %+v", key, got, value)
	}
	return nil
}
