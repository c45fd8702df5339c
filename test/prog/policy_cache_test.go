package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

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
		"revoked, and what gets no RST": {
			{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, true}, {0, forth, syn, nil, drop, pair, bpf.FlowEstablished, false},
			{0, forth, rst | ack, nil, drop, pair, bpf.FlowEstablished, false}, {0, forth, synack, nil, drop, pair, bpf.FlowEstablished, false},
			{0, "pod:4001 > pod2:80", ack, nil, drop, pair, bpf.FlowEstablished, false}, {1, "pod2:81 > pod:4000", ack, nil, drop, pair, bpf.FlowEstablished, false},
		},
		"a reply of no connection": {{0, "pod2:81 > pod:4000", synack, nil, drop, pair, bpf.FlowEstablished, false}},
		"FINs": {
			{0, forth, finack, nil, redirect, pair, bpf.FlowFINWait, false}, {1, back, finack, nil, redirect, pair, bpf.FlowFINWait, false},
			{0, forth, ack, nil, redirect, pair, bpf.FlowTimeWait, false},
		},
		"RST":               {{1, back, rst, nil, redirect, pair, bpf.FlowClose, false}},
		"RST of the client": {{0, forth, rst, nil, redirect, pair, bpf.FlowClose, false}},
		"revoked": {
			{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, true}, {0, forth, rst, nil, drop, pair, bpf.FlowEstablished, false},
			{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, false}, // each side gets one RST
			{1, back, ack, nil, redirect, pair, bpf.FlowEstablished, false}, {0, forth, finack, nil, drop, pair, bpf.FlowEstablished, false},
			{1, back, ack, nil, drop, pair, bpf.FlowEstablished, false},
			{1, back, ack, func(p *testenv.Packet) { p.Ack++ }, redirect, pair, bpf.FlowEstablished, false}, // the first RST was too old
		},
		"a reply through the stack": {
			{1, back, ack, byStack, next, pair, bpf.FlowEstablished, false}, {0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, false},
		},
		"revoked, and a reply through the stack": {
			{0, forth, ack, nil, redirect, pair, bpf.FlowEstablished, true}, {1, back, ack, func(p *testenv.Packet) { byStack(p); p.TCPFlags = rst }, drop, 0, 0, false},
		},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(name+" "+s.name, func(t *testing.T) {
				testenv.Must(t, errors.Join(
					h.start(s, bpf.FastPathAlways), h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }),
					h.putPolicy(isolated, all), h.emptyForwardingCache(),
				))
				revoked := false
				for i, p := range append(append([]sent{}, open...), then...) {
					from, to := "pod", "pod2"
					if p.text != forth {
						from, to = to, from
					}
					var got outcome
					var answered testenv.Packet
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
							answered = *q
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
					if revoked && got.verdict == redirect {
						if err := checkReset(got.frame, answered); err != nil {
							t.Errorf("packet %d: %v", i, err)
						}
					}
					if revoked = revoked || p.revokeThen; p.revokeThen {
						testenv.Must(t, h.putPolicy(isolated, &maps.RuleSet{}))
					}
				}
			})
		}
	}
}

// checkReset wants the RST that answers a segment.
func checkReset(frame []byte, segment testenv.Packet) error {
	got, err := testenv.Decode(frame)
	if err != nil {
		return err
	}
	want := testenv.Packet{
		SrcMAC: got.SrcMAC, DstMAC: segment.SrcMAC, Src: segment.Dst, Dst: segment.Src, Proto: unix.IPPROTO_TCP, TTL: 64, DontFragment: segment.Src.Is4(),
		SrcPort: segment.DstPort, DstPort: segment.SrcPort, TCPFlags: rst, Seq: segment.Ack,
	}
	if diff := testenv.Diff(got, want); diff != "" {
		return errors.New(diff)
	}
	return testenv.VerifyChecksums(frame)
}

// A revoked connection gives a RST neither to others who forge its segments, nor the right to send anything else by the
// tag of RSTs, and there is a limit for each container.
func TestResetsAreGuarded(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	const forth, back = "pod:4000 > pod2:80", "pod2:80 > pod:4000"
	const tagReset, limit, count = 0xea, 4000, 0xffff
	all := &maps.RuleSet{Rules: []maps.Rule{{Kind: maps.AnyPeer}}}
	h.eachScene(t, []proto{tcp}, func(s scene) error {
		segment := func(flags uint8, seq, ack uint32) func(*testenv.Packet) {
			return func(p *testenv.Packet) { p.TCPFlags, p.Seq, p.Ack = flags, seq, ack }
		}
		want := func(verdict uint32, from, to, text string, edit func(*testenv.Packet)) error {
			got, err := h.deliver(s, from, to, text, edit)
			return errors.Join(err, checkVerdict(got.verdict, verdict))
		}
		tagged := func(verdict uint32, edits ...func(*testenv.Packet)) error {
			p := h.packet(s, "pod", forth)
			p.Payload = ""
			for _, edit := range edits {
				edit(&p)
			}
			got, err := h.tags.runTagged(h.devices["pod"], tagReset, p.MustBuild())
			return errors.Join(err, checkVerdict(got.verdict, verdict))
		}
		err := errors.Join(
			h.start(s, bpf.FastPathAlways), h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }), h.putPolicy(all, all),
			want(verdictRedirect, "pod", "pod2", forth, segment(syn, podSYN, 0)), want(verdictRedirect, "pod2", "pod", back, segment(synack, podACK-1, podSYN+1)),
			want(verdictRedirect, "pod", "pod2", forth, segment(ack, podSYN+1, podACK)), h.putPolicy(&maps.RuleSet{}, &maps.RuleSet{}),
		)
		forged := h.packet(s, "pod2", back)
		verdict, _, errForged := h.runAt(bpf.ProgToContainer, h.devices["pod"], &netlink.LinkAttrs{Index: 1}, outcome{frame: forged.MustBuild()})
		err = errors.Join(err, errForged, checkVerdict(verdict, verdictDrop), tagged(verdictDrop, segment(rst, podSYN+1, 0)),
			want(verdictRedirect, "pod2", "pod", back, segment(ack, podACK, podSYN+1)), // the RST
			tagged(verdictDrop, segment(rst, podSYN+2, 0)), tagged(verdictDrop, segment(rst|ack, podSYN+1, podACK)),
			tagged(verdictDrop, segment(rst, podSYN+1, 0), func(p *testenv.Packet) { p.Payload = "x" }), tagged(verdictRedirect, segment(rst, podSYN+1, 0)),
		)
		// The limit is for a tick, and the next one may begin at any time.
		notes := h.programs.Maps[bpf.MapTupleNotes]
		for try := range uint32(10) {
			err = errors.Join(err, want(verdictRedirect, "pod", "pod2", forth, segment(ack, podSYN+1, podACK+2*try)))
			all, errNotes := contents[uint32, uint64](notes)
			for place, note := range all {
				if n := note & count; n > 0 && n < 3 {
					err = errors.Join(err, notes.Put(place, note&^count|limit))
				}
			}
			got, errSent := h.deliver(s, "pod", "pod2", forth, segment(ack, podSYN+1, podACK+2*try+1))
			if err = errors.Join(err, errNotes, errSent); err != nil || got.verdict == verdictDrop {
				return err
			}
		}
		return errors.New("no limit")
	})
}
