package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// What bypasses the stack to the outside by the forwarding cache ends with the next packet after the permission: the
// policy's generation voids the entry, also if from_container had admitted the packet for which to_uplink made it.
func TestRevocationVoidsTheForwardingCache(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	all := &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.AnyPeer}}}
	for name, change := range map[string]struct{ before, after [2]*maps.RuleSet }{ // ingress, egress
		"the only direction": {before: [2]*maps.RuleSet{nil, all}, after: [2]*maps.RuleSet{nil, {Host: true}}},
		"both directions":    {before: [2]*maps.RuleSet{all, all}, after: [2]*maps.RuleSet{all, {Host: true}}},
		"a new direction":    {before: [2]*maps.RuleSet{all, nil}, after: [2]*maps.RuleSet{all, {Host: true}}},
	} {
		eachScene(t, []proto{udp}, func(t *testing.T, s scene) {
			leave := func() (cached bool, verdict uint32, err error) {
				sent, err := h.send(s, "pod", "pod:4000 > remote:80")
				if err != nil || sent.tag == tagTranslated {
					return sent.tag == tagTranslated, sent.verdict, err
				}
				copy(sent.frame, []byte{2, 0, 0, 0, 0, 9}) // the next hop
				verdict, _, err = h.runAt(bpf.ProgToUplink, h.veth, h.veth, sent)
				return false, verdict, err
			}
			err := h.on(0, func() error {
				err := errors.Join(
					h.start(s, bpf.FastPathAlways), h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }),
					h.putPolicy(change.before[0], change.before[1]), h.emptyForwardingCache(),
				)
				cached := false
				for range 4 {
					var errSent error
					cached, _, errSent = leave()
					err = errors.Join(err, errSent)
				}
				if !cached {
					err = errors.Join(err, errors.New("no entry of the forwarding cache"))
				}
				err = errors.Join(err, h.putPolicy(change.after[0], change.after[1]))
				cached, verdict, errSent := leave()
				if cached {
					err = errors.Join(err, errors.New("the entry is used after the revocation"))
				}
				return errors.Join(err, errSent, checkVerdict(verdict, verdictDrop))
			})
			if err != nil {
				t.Error(fmt.Errorf("%s: %w", name, err))
			}
		})
	}
}

// Two containers with rules have one flow, whose state is right although cached decisions forward most packets:
// FINs and RSTs, too. Replies are admitted on each CPU, and through the stack, only if the flow is there.
func TestFlowOfPair(t *testing.T) {
	testenv.Require(t, ingressDevice)
	testenv.Require(t, twoCPUs)
	h := newCacheHost(t)
	const forth, back = "pod:4000 > pod2:80", "pod2:80 > pod:4000"
	all := &maps.RuleSet{Rules: []maps.Rule{{Kind: maps.AnyPeer}}}
	byStack := func(p *testenv.Packet) {
		if p.TTL = 1; p.Dst.Is4() {
			p.TTL, p.Options = 64, "\x01\x01\x01\x01"
		}
	}
	type sent struct {
		cpu        int
		text       string
		flags      uint8
		edit       func(*testenv.Packet)
		verdict    uint32
		flow       bpf.FlowKind // that has the state afterwards; 0: there is none
		state      bpf.FlowState
		revokeThen bool
	}
	const pair, redirect, next, drop = bpf.FlowPair, verdictRedirect, verdictNext, verdictDrop
	open := []sent{
		{0, forth, syn, nil, redirect, pair, bpf.FlowSYNSent, false},
		{1, back, synack, nil, redirect, pair, bpf.FlowSYNRecv, false},
		{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, false},
	}
	for name, then := range map[string][]sent{
		"a reply of no connection": {{0, "pod2:81 > pod:4000", synack, nil, drop, pair, bpf.FlowEstablished, false}},
		"FINs": {
			{0, forth, finack, nil, redirect, pair, bpf.FlowFINWait, false}, {1, back, finack, nil, redirect, pair, bpf.FlowFINWait, false},
			{0, forth, ack, nil, redirect, pair, bpf.FlowFINWait, false},
		},
		"RST":               {{1, back, rst, nil, redirect, pair, bpf.FlowClose, false}},
		"RST of the client": {{0, forth, rst, nil, redirect, pair, bpf.FlowClose, false}},
		"revoked": {
			{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, true}, {0, forth, ack, nil, drop, pair, bpf.FlowEstablished, false},
			{1, back, ack, nil, drop, pair, bpf.FlowEstablished, false}, {0, forth, finack, nil, drop, pair, bpf.FlowEstablished, false},
		},
		"a reply through the stack": {
			{1, back, ack, byStack, next, bpf.FlowPolicy, bpf.FlowEstablished, false}, {0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, false},
		},
		"revoked, and a reply through the stack": {
			{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, true}, {1, back, ack, byStack, drop, 0, 0, false},
		},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(name+" "+s.name, func(t *testing.T) {
				testenv.Must(t, errors.Join(
					h.start(s, bpf.FastPathAlways), h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }),
					h.putPolicy(isolated, all), h.emptyForwardingCache(),
				))
				for i, p := range append(append([]sent{}, open...), then...) {
					from, to := "pod", "pod2"
					if p.text != forth {
						from, to = to, from
					}
					var got outcome
					err := h.on(p.cpu, func() (err error) {
						got, err = h.deliver(s, from, to, p.text, flags(p.flags), func(q *testenv.Packet) {
							if q.Seq, q.Ack = podSYN, podACK; p.text != forth {
								q.Seq, q.Ack = remoteSYN, podSYN+1
							}
							if p.flags != syn && p.text == forth {
								q.Seq++
							}
							if p.edit != nil {
								p.edit(q)
							}
						})
						return err
					})
					flows, errFlows := h.flows().ofKind(func(kind bpf.FlowKind) bool { return kind == p.flow })
					testenv.Must(t, errors.Join(err, errFlows, checkVerdict(got.verdict, p.verdict)))
					for _, flow := range flows {
						if flow.State != p.state {
							t.Errorf("packet %d: got state %d, want %d", i, flow.State, p.state)
						}
					}
					if len(flows) != 1 && p.flow != 0 {
						t.Errorf("packet %d: got %d flows of kind %d, want 1", i, len(flows), p.flow)
					}
					if p.revokeThen {
						testenv.Must(t, h.putPolicy(isolated, &maps.RuleSet{}))
					}
				}
			})
		}
	}
}
