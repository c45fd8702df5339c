package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// eachFlag returns what opens, continues, and ends a connection of the protocol.
func eachFlag(s scene) []func(*testenv.Packet) {
	if s.proto == udp {
		return []func(*testenv.Packet){func(*testenv.Packet) {}}
	}
	var edits []func(*testenv.Packet)
	for _, flags := range []uint8{testenv.SYN, testenv.SYN | testenv.ACK, testenv.ACK, testenv.FIN | testenv.ACK, testenv.RST} {
		edits = append(edits, func(p *testenv.Packet) { p.TCPFlags = flags })
	}
	return edits
}

// A connection between containers of two nodes has no state past the stack, so one decision holds for all its packets: without the
// entry of its node, a packet that was decided in full would be translated.
func TestBypassToNodesHasNoState(t *testing.T) {
	testenv.Require(t, ingressDevice)
	const toNode = "pod:4321 > remote:80" // a port to which no other test has a flow
	all := &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.AnyPeer}}}
	h := newNodesCacheHost(t)
	for name, tc := range map[string]struct {
		before func(s scene) error
		after  func() error
		tags   [2]uint32 // before and after
	}{
		"one decision":           {tags: [2]uint32{tagTranslated, tagTranslated}},
		"in the next generation": {tags: [2]uint32{tagTranslated, tagBypass}, after: h.emptyForwardingCache},
		"a port that has replied by a flow": {tags: [2]uint32{tagBypass, tagBypass}, before: func(s scene) error {
			return h.markPort(bpf.PortReplies, s.number(), 4321)
		}},
		"a sender with rules": {tags: [2]uint32{tagBypass, tagBypass}, before: func(s scene) error {
			return errors.Join(h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }), h.putPolicy(nil, all))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, s := range (row{on: withPorts}).scenes() {
				err := h.on(0, func() error {
					err := errors.Join(h.putMode(bpf.NodeDirect), h.start(s, bpf.FastPathAlways))
					if tc.before != nil {
						err = errors.Join(err, tc.before(s))
					}
					for when, tag := range tc.tags {
						for _, edit := range eachFlag(s) {
							sent, sendErr := h.send(s, "pod", toNode, edit)
							if sent.tag &^= tagJudged; sent.tag != tag {
								sendErr = errors.Join(sendErr, fmt.Errorf("packet %d: tag %#x, want %#x", when, sent.tag, tag))
							}
							err = errors.Join(err, sendErr, checkVerdict(sent.verdict, verdictRedirect))
						}
						if when == 0 {
							err = errors.Join(err, h.putMode(0))
						}
						if when == 0 && tc.after != nil {
							err = errors.Join(err, tc.after())
						}
					}
					return err
				})
				if err != nil {
					t.Errorf("%s %s: %v", s.name, s.proto, err)
				}
			}
		})
	}
}

// The same for what arrives: a packet that was decided in full would be dropped as forged.
func TestBypassFromNodesHasNoState(t *testing.T) {
	const fromNode = "remote:5000 > pod:80"
	all := &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.AnyPeer}}}
	h := newNodesCacheHost(t)
	for name, tc := range map[string]struct {
		before  func(s scene) error
		verdict uint32 // of packets that open or end a connection, afterwards
	}{
		"one decision": {verdict: verdictRedirect},
		"a host port's target": {verdict: verdictDrop, before: func(s scene) error {
			return h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)
		}},
		"a receiver with rules": {verdict: verdictDrop, before: func(s scene) error {
			return errors.Join(h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }), h.putPolicy(all, nil))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, s := range (row{on: []proto{tcp}}).scenes() {
				err := h.on(0, func() error {
					err := errors.Join(h.putMode(bpf.NodeDirect), h.start(s, bpf.FastPathAlways))
					if tc.before != nil {
						err = errors.Join(err, tc.before(s))
					}
					err = errors.Join(err, h.arrives(s, fromNode, verdictRedirect, bySYN), h.putMode(bpf.NodeTunnel))
					for _, flags := range []uint8{testenv.SYN, testenv.SYN | testenv.ACK, testenv.FIN | testenv.ACK, testenv.RST} {
						err = errors.Join(err, h.arrives(s, fromNode, tc.verdict, func(p *testenv.Packet) { p.TCPFlags = flags }))
					}
					return err
				})
				if err != nil {
					t.Errorf("%s: %v", s.name, err)
				}
			}
		})
	}
}

// An offloaded connection of nodes has a state. Once it has ended, the next one on the same ports begins in the stack.
func TestOffloadsOfNodesEnd(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newNodesCacheHost(t)
	lastACK := func(p *testenv.Packet) {
		p.TCPFlags = testenv.ACK
		p.Seq, p.Ack = 2000-uint32(len(p.Payload))-1, 1000
	}
	for name, tc := range map[string]struct {
		known offload
		send  func(s scene, verdict uint32, edit func(*testenv.Packet)) error
	}{
		"to a node": {podToOutside, func(s scene, verdict uint32, edit func(*testenv.Packet)) error {
			return h.wantSent(s, "pod", "pod:4000 > remote:80", verdict, edit)
		}},
		"from a node": {outsideToPod, func(s scene, verdict uint32, edit func(*testenv.Packet)) error {
			return h.arrives(s, "remote:5000 > pod:80", verdict, edit)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, s := range (row{on: []proto{tcp}}).scenes() {
				err := h.on(0, func() error {
					return errors.Join(
						h.putMode(bpf.NodeDirect), h.start(s, bpf.FastPathEstablished), h.offload(s, tc.known.state(both|ends0|ends1|128)),
						tc.send(s, verdictRedirect, lastACK), h.wantKnown(s, 0), tc.send(s, verdictNext, bySYN),
					)
				})
				if err != nil {
					t.Errorf("%s: %v", s.name, err)
				}
			}
		})
	}
}
