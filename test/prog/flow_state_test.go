package prog

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Flags of flows and packets, short for the tables below.
const (
	hasFIN     = bpf.FlowFIN
	remoteFIN  = bpf.FlowRemoteFIN
	unackedFIN = bpf.FlowFINUnacked
	unknownRST = bpf.FlowRSTUnknown

	syn    = testenv.SYN
	ack    = testenv.ACK
	synack = testenv.SYN | testenv.ACK
	finack = testenv.FIN | testenv.ACK
	rst    = testenv.RST
	rstack = testenv.RST | testenv.ACK
)

// segment is a TCP packet of a connection, and the state of its flow afterwards. Payload is 7 bytes.
type segment struct {
	remote   bool // by the remote, or in its name
	tcp      uint8
	seq, ack uint32
	data     bool
	state    bpf.FlowState
	flags    bpf.FlowFlags
}

func pod(tcp uint8, seq, ack uint32, state bpf.FlowState, flags bpf.FlowFlags) segment {
	return segment{tcp: tcp, seq: seq, ack: ack, state: state, flags: flags}
}

func remote(tcp uint8, seq, ack uint32, state bpf.FlowState, flags bpf.FlowFlags) segment {
	return segment{remote: true, tcp: tcp, seq: seq, ack: ack, state: state, flags: flags}
}

// with7 gives the segment 7 bytes.
func (s segment) with7() segment { s.data = true; return s }

// The handshakes: the pod's numbers begin with 1000, the remote's with 5000.
func opened() []segment {
	return []segment{
		pod(syn, 1000, 0, bpf.FlowSYNSent, 0),
		remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied),
		pod(ack, 1001, 5001, bpf.FlowEstablished, replied),
	}
}

func served() []segment {
	return []segment{
		remote(syn, 5000, 0, bpf.FlowSYNSent, 0),
		pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
		remote(ack, 5001, 1001, bpf.FlowEstablished, replied),
	}
}

// TestFlowState follows connections, that a pod opens (SNAT) or serves (DNAT), packet by packet.
func TestFlowState(t *testing.T) {
	const est = bpf.FlowEstablished
	all := []bpf.FlowKind{bpf.FlowSNAT, bpf.FlowDNAT}
	snats, dnats := all[:1], all[1:]
	h := newHost(t)
	for _, tc := range []struct {
		name string
		on   []bpf.FlowKind
		open bool // after the handshake
		then []segment
	}{
		{name: "data", on: all, open: true, then: []segment{
			pod(ack, 1001, 5001, est, replied).with7(), remote(ack, 5001, 1008, est, replied).with7(), pod(ack, 1008, 5008, est, replied),
		}},
		{name: "the pod closes first", on: all, open: true, then: []segment{
			pod(finack, 1001, 5001, bpf.FlowFINWait, replied|hasFIN),
			remote(ack, 5001, 1002, bpf.FlowFINWait, replied|hasFIN),
			remote(finack, 5001, 1002, bpf.FlowFINWait, replied|hasFIN|unackedFIN),
			pod(ack, 1002, 5002, bpf.FlowTimeWait, replied|hasFIN|remoteFIN),
		}},
		{name: "the remote closes first", on: all, open: true, then: []segment{
			remote(finack, 5001, 1001, est, replied|unackedFIN),
			pod(ack, 1001, 5002, bpf.FlowCloseWait, replied|remoteFIN),
			pod(finack, 1001, 5002, bpf.FlowLastACK, replied|remoteFIN|hasFIN),
			remote(ack, 5002, 1002, bpf.FlowTimeWait, replied|remoteFIN|hasFIN),
		}},
		{name: "the remote closes with its last data", on: all, open: true, then: []segment{
			remote(finack, 5001, 1001, est, replied|unackedFIN).with7(),
			pod(ack, 1001, 5008, est, replied|unackedFIN), // the data, not yet the FIN
			pod(ack, 1001, 5009, bpf.FlowCloseWait, replied|remoteFIN),
		}},
		{name: "the pod acknowledges the FIN with its own", on: all, open: true, then: []segment{
			remote(finack, 5001, 1001, est, replied|unackedFIN),
			pod(finack, 1001, 5002, bpf.FlowLastACK, replied|remoteFIN|hasFIN),
		}},
		{name: "a FIN with another number, which the pod does not acknowledge", on: all, open: true, then: []segment{
			remote(finack, 9000, 1001, est, replied|unackedFIN),
			pod(ack, 1001, 5001, est, replied|unackedFIN),
			remote(ack, 5001, 1001, est, replied|unackedFIN).with7(),
			pod(ack, 1001, 5008, est, replied|unackedFIN),
		}},
		{name: "FINs with other numbers, after the pod's", on: all, open: true, then: []segment{
			pod(finack, 1001, 5001, bpf.FlowFINWait, replied|hasFIN),
			remote(finack, 9000, 1002, bpf.FlowFINWait, replied|hasFIN|unackedFIN),
			pod(ack, 1002, 5001, bpf.FlowFINWait, replied|hasFIN|unackedFIN),
		}},
		{name: "the pod resets", on: all, open: true, then: []segment{
			pod(ack, 1001, 5001, est, replied).with7(), pod(rst, 1008, 0, bpf.FlowClose, replied|hasFIN),
		}},
		{name: "the remote resets", on: all, open: true, then: []segment{
			remote(rst, 5001, 0, bpf.FlowClose, replied),
		}},
		{name: "the remote resets behind data that is not acknowledged", on: all, open: true, then: []segment{
			remote(ack, 5001, 1001, est, replied).with7(), remote(rst, 5008, 0, bpf.FlowClose, replied),
		}},
		{name: "resets with other numbers", on: all, open: true, then: []segment{
			remote(rst, 0, 0, est, replied|unknownRST), remote(rst, 5000, 0, est, replied|unknownRST),
			remote(rst, 5002, 0, est, replied|unknownRST), remote(rstack, 6000, 1001, est, replied|unknownRST),
			pod(ack, 1001, 5001, est, replied), // it continues
		}},
		{name: "a reset with the end of data that cannot be in flight", on: all, open: true, then: []segment{
			remote(ack, 5001+1<<20, 1001, est, replied), remote(rst, 5001+1<<20, 0, est, replied|unknownRST),
		}},
		{name: "the pod goes on after a reset that it ignored", on: all, open: true, then: []segment{
			remote(rst, 5001, 0, bpf.FlowClose, replied), pod(ack, 1001, 5001, est, replied).with7(),
		}},
		{name: "nothing goes on after the pod's reset", on: all, open: true, then: []segment{
			pod(rst, 1001, 0, bpf.FlowClose, replied|hasFIN), remote(ack, 5001, 1001, bpf.FlowClose, replied|hasFIN).with7(),
			pod(ack, 1001, 5001, bpf.FlowClose, replied|hasFIN),
		}},
		{name: "a SYN in the remote's name", on: all, open: true, then: []segment{remote(syn, 7000, 0, est, replied)}},
		{name: "a SYN+ACK in the remote's name", on: snats, open: true, then: []segment{remote(synack, 7000, 1001, est, replied)}},

		{name: "the pod's SYN again", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied),
		}},
		{name: "half open", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied), remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied),
		}},
		{name: "SYN+ACK with another number", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(synack, 5000, 1002, bpf.FlowSYNSent, 0), remote(ack, 5001, 1001, bpf.FlowSYNSent, 0),
		}},
		{name: "the remote refuses", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(rstack, 0, 1001, bpf.FlowClose, 0),
		}},
		{name: "somebody refuses in the remote's name", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(rstack, 0, 1000, bpf.FlowSYNSent, unknownRST),
			remote(rst, 0, 0, bpf.FlowSYNSent, unknownRST), remote(rst, 1001, 1001, bpf.FlowSYNSent, unknownRST),
			remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied|unknownRST),
			pod(ack, 1001, 5001, est, replied),
		}},
		{name: "somebody sends FIN in the remote's name before the handshake", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(finack, 9000, 1, bpf.FlowSYNSent, 0),
			remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied), pod(ack, 1001, 5001, est, replied),
		}},
		{name: "the pod resets an earlier connection of the remote before the handshake", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(ack, 9000, 700, bpf.FlowSYNSent, 0),
			pod(rst, 700, 0, bpf.FlowSYNSent, 0), pod(syn, 1000, 0, bpf.FlowSYNSent, 0),
			remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied), pod(rst, 700, 0, bpf.FlowSYNRecv, replied),
			pod(ack, 1001, 5001, est, replied),
		}},
		{name: "the pod refuses the SYN+ACK", on: snats, then: []segment{
			pod(syn, 1000, 0, bpf.FlowSYNSent, 0), remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied),
			pod(rst, 1001, 0, bpf.FlowClose, replied|hasFIN),
		}},
		{name: "picked up from the pod, which resets", on: snats, then: []segment{
			pod(ack, 1001, 5001, bpf.FlowSYNSent, pickedUp), pod(rst, 1001, 0, bpf.FlowClose, pickedUp|hasFIN),
		}},
		{name: "picked up from the pod", on: snats, then: []segment{
			pod(ack, 1001, 5001, bpf.FlowSYNSent, pickedUp), remote(ack, 5001, 1001, bpf.FlowSYNRecv, pickedUp|replied),
			pod(ack, 1001, 5001, est, pickedUp|replied),
		}},
		{name: "opened anew after the end", on: snats, open: true, then: []segment{
			pod(rst, 1001, 0, bpf.FlowClose, replied|hasFIN), pod(syn, 3000, 0, bpf.FlowSYNSent, 0), remote(synack, 8000, 3001, bpf.FlowSYNRecv, replied),
		}},

		{name: "a scan", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(rstack, 0, 5001, bpf.FlowClose, hasFIN),
		}},
		{name: "the remote's SYN again", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
			remote(syn, 5000, 0, bpf.FlowSYNRecv, replied), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
		}},
		{name: "the pod resets somebody who does not know its number", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
			remote(ack, 5001, 700, bpf.FlowSYNRecv, replied), pod(rst, 700, 0, bpf.FlowSYNRecv, replied),
			remote(ack, 5001, 1001, est, replied),
		}},
		{name: "the pod resets before it is established", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
			pod(rst, 1001, 0, bpf.FlowClose, replied|hasFIN),
		}},
		{name: "a client that does not know the pod's number", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
			remote(ack, 5001, 1000, bpf.FlowSYNRecv, replied), remote(ack, 5001, 1002, bpf.FlowSYNRecv, replied),
		}},
		{name: "a client that does not know the pod's number, and gets an ACK for a packet outside of the window", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied),
			remote(ack, 5001+1<<30, 0, bpf.FlowSYNRecv, replied), pod(ack, 1001, 5001, bpf.FlowSYNRecv, replied),
		}},
		{name: "the pod is first to send, and the client's ACK was lost", on: dnats, then: []segment{
			remote(syn, 5000, 0, bpf.FlowSYNSent, 0), pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied), pod(ack, 1001, 5001, est, replied).with7(),
		}},
		{name: "picked up from the remote", on: dnats, then: []segment{
			remote(ack, 5001, 1001, bpf.FlowSYNSent, pickedUp), remote(ack, 5001, 1001, bpf.FlowSYNSent, pickedUp),
			pod(ack, 1001, 5001, bpf.FlowSYNRecv, pickedUp|replied), remote(ack, 5001, 1001, est, pickedUp|replied),
		}},
		{name: "opened anew after the end", on: dnats, open: true, then: []segment{
			remote(rst, 5001, 0, bpf.FlowClose, replied), remote(syn, 7000, 0, bpf.FlowSYNSent, 0), pod(synack, 3000, 7001, bpf.FlowSYNRecv, replied),
		}},
	} {
		for _, kind := range tc.on {
			for _, s := range (row{on: []proto{tcp}}).scenes() {
				t.Run(fmt.Sprintf("%s %s, kind %d", s.name, tc.name, kind), func(t *testing.T) {
					segments := tc.then
					switch {
					case tc.open && kind == bpf.FlowSNAT:
						segments = append(opened(), segments...)
					case tc.open:
						segments = append(served(), segments...)
					}
					h.follow(t, s, kind, segments)
				})
			}
		}
	}
}

// follow sends the segments of a connection.
func (h *host) follow(t *testing.T, s scene, kind bpf.FlowKind, segments []segment) {
	t.Helper()
	sides := map[bool]hop{
		false: {program: bpf.ProgToUplink, in: "pod:4000 > remote:80", out: "node:* > remote:80"},
		true:  {program: bpf.ProgFromUplink, in: "remote:80 > node:*", out: "remote:80 > pod:4000"},
	}
	if kind == bpf.FlowDNAT {
		sides = map[bool]hop{
			false: {program: bpf.ProgToUplink, in: "pod:80 > remote:5000", out: "node:8080 > remote:5000"},
			true:  {program: bpf.ProgFromUplink, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80"},
		}
	}
	testenv.Must(t, errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)))
	for i, segment := range segments {
		step := sides[segment.remote]
		if segment.remote && segment.tcp == syn && kind == bpf.FlowSNAT {
			step.out = "" // no reply
		}
		p := s.packet(step.in, false)
		p.TCPFlags, p.Seq, p.Ack, p.Payload = segment.tcp, segment.seq, segment.ack, ""
		if segment.data {
			p.Payload = "payload"
		}
		if _, err := h.hop(&s, p, false, step); err != nil {
			t.Fatalf("segment %d, %+v: %v", i, segment, err)
		}
		got, err := h.onlyFlow()
		testenv.Must(t, err)
		if got.State != segment.state || got.Flags != segment.flags {
			t.Fatalf("segment %d, %+v: state is %d with flags %#x, want %d with %#x", i, segment, got.State, got.Flags, segment.state, segment.flags)
		}
	}
}

// onlyFlow returns the only entry of flows.
func (h *host) onlyFlow() (flow bpf.Flow, err error) {
	all, err := h.flows().all()
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("%d flows, want 1: %+v", len(all), all)
	}
	for _, flow = range all {
	}
	return flow, err
}

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
					testenv.Must(t, h.reset())
					testenv.Must(t, h.fill(s, nil, []flow{old}))
					if got := h.masquerade(t, s, outgoing); got != want {
						t.Errorf("idle for %s: port is %d, want %d", idle, got, want)
					}
					holder := old
					if want == candidates[0] {
						holder = snat("remote:80", "node:*", "pod:4000")
					}
					testenv.NoError(t, h.checkFlow(s, holder))
				}
			})
		}
	}
}

// checkFlow wants flows to have an entry, among others.
func (h *host) checkFlow(s scene, want flow) error {
	var got bpf.Flow
	key, value := want.wire(s)
	if err := h.flows().Lookup(key, &got); err != nil {
		return err
	}
	if got = untimed(got, value); got != value {
		return fmt.Errorf("flow %+v is %+v, want %+v", key, got, value)
	}
	return nil
}
