package prog

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// trackedConnection is a connection of the pod's with the remote, past the stack, whose SYN each CPU's forwarding cache
// remembers.
type trackedConnection struct {
	sent, received string // the packets of both sides, at the hooks that receive them
	ports          []hostPort
	segments       []trackedSegment
}

type trackedSegment struct {
	segment
	cached bool // is forwarded by the decision for a former one
}

func cachedly(s segment) trackedSegment { return trackedSegment{s, true} }
func fully(s segment) trackedSegment    { return trackedSegment{s, false} }

var trackedConnections = map[string]trackedConnection{
	"that the pod opens": {
		sent: "pod:4000 > remote:80", received: "remote:80 > node:*",
		segments: []trackedSegment{
			fully(pod(syn, 1000, 0, bpf.FlowSYNSent, 0)),
			fully(remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied)),
			cachedly(pod(ack, 1001, 5001, bpf.FlowEstablished, replied)),
			cachedly(pod(finack, 1001, 5001, bpf.FlowFINWait, replied|hasFIN)),
			fully(remote(finack, 5001, 1002, bpf.FlowFINWait, replied|hasFIN|unackedFIN)),
			cachedly(pod(ack, 1002, 5002, bpf.FlowTimeWait, replied|hasFIN|remoteFIN)),
		},
	},
	"that the pod resets": {
		sent: "pod:4000 > remote:80", received: "remote:80 > node:*",
		segments: []trackedSegment{
			fully(pod(syn, 1000, 0, bpf.FlowSYNSent, 0)),
			fully(remote(synack, 5000, 1001, bpf.FlowSYNRecv, replied)),
			cachedly(pod(rst, 1001, 0, bpf.FlowClose, replied|hasFIN)),
			fully(pod(syn, 3000, 0, bpf.FlowSYNSent, 0)),
		},
	},
	"to a host port": {
		sent: "pod:80 > remote:4000", received: "remote:4000 > node:8080", ports: []hostPort{{host: "node:8080", to: "pod:80"}},
		segments: []trackedSegment{
			fully(remote(syn, 5000, 0, bpf.FlowSYNSent, 0)),
			fully(pod(synack, 1000, 5001, bpf.FlowSYNRecv, replied)),
			cachedly(remote(ack, 5001, 1001, bpf.FlowEstablished, replied)),
			fully(remote(finack, 5001, 1001, bpf.FlowEstablished, replied|unackedFIN)),
			cachedly(pod(ack, 1001, 5002, bpf.FlowCloseWait, replied|remoteFIN)),
			cachedly(pod(finack, 1001, 5002, bpf.FlowLastACK, replied|remoteFIN|hasFIN)),
			cachedly(remote(ack, 5002, 1002, bpf.FlowLastACK, replied|remoteFIN|hasFIN)),
		},
	},
}

// pass sends the segment through the hooks past the stack. It reports whether a former decision was enough: for the remote's,
// without what the full decision needs.
func (h *cacheHost) pass(s scene, c trackedConnection, seg trackedSegment) (cached bool, err error) {
	edit := func(p *testenv.Packet) { p.TCPFlags, p.Seq, p.Ack, p.Payload = seg.tcp, seg.seq, seg.ack, "" }
	if !seg.remote {
		sent, err := h.send(s, "pod", c.sent, edit)
		if err != nil || sent.tag == tagTranslated {
			return true, errors.Join(err, checkVerdict(sent.verdict, verdictRedirect))
		}
		copy(sent.frame, []byte{2, 0, 0, 0, 0, 9}) // the next hop
		verdict, _, err := h.runAt(bpf.ProgToUplink, h.veth, h.veth, sent)
		return false, errors.Join(err, checkVerdict(sent.verdict, verdictRedirect), checkVerdict(verdict, verdictNext))
	}
	p := s.packet(c.received, false)
	edit(&p)
	copy(p.DstMAC[:], h.uplink.HardwareAddr)
	if seg.cached {
		for _, port := range c.ports {
			key, _ := port.wire(s)
			err = errors.Join(err, h.programs.Maps[bpf.MapHostPorts].Delete(&key))
		}
	}
	verdict, _, errRun := h.run(bpf.ProgFromUplink, p.MustBuild())
	return seg.cached, errors.Join(err, errRun, checkVerdict(verdict, verdictRedirect), h.fill(s, c.ports, nil))
}

// Packets that a former decision forwards past the stack change the state of the flow that translates them, as those do that are
// decided in full.
func TestForwardingCacheTracksTranslated(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	for name, c := range trackedConnections {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(s.name+" "+name, func(t *testing.T) {
				err := h.on(0, func() error {
					err := errors.Join(h.start(s, always), h.fill(s, c.ports, nil))
					for i, seg := range c.segments {
						cached, passErr := h.pass(s, c, seg)
						all, flowsErr := h.flows().all()
						if err = errors.Join(err, passErr, flowsErr); err != nil {
							return fmt.Errorf("segment %d: %w", i, err)
						}
						if len(all) != 1 {
							return fmt.Errorf("segment %d: got %d flows, want 1", i, len(all))
						}
						for key, flow := range all {
							if flow.State != seg.state || flow.Flags != seg.flags || cached != seg.cached {
								return fmt.Errorf("segment %d: state %d with flags %#x, cached %v; want %d with %#x, %v",
									i, flow.State, flow.Flags, cached, seg.state, seg.flags, seg.cached)
							}
							if key.Kind == bpf.FlowSNAT {
								s.star = key.LocalPort
							}
						}
					}
					return nil
				})
				testenv.NoError(t, err)
			})
		}
	}
}

// The decision for a connection's first packet holds for packets up to the route's MTU: a request is longer than a SYN.
func TestForwardingCacheSendsUpToTheMTU(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			err := h.on(0, func() error {
				if err := errors.Join(h.start(s, always), h.handshake(&s)); err != nil {
					return err
				}
				for _, tc := range []struct {
					name    string
					len     int
					verdict uint32
					cached  bool
				}{
					{"a request", 1400, verdictRedirect, true},
					{"more than the MTU", 1500, verdictNext, false},
				} {
					sent, err := h.send(s, "pod", "pod:4000 > remote:80", func(p *testenv.Packet) {
						p.TCPFlags, p.Seq, p.Ack, p.Payload = ack, 1001, 5001, strings.Repeat("x", tc.len)
					})
					if err = errors.Join(err, checkVerdict(sent.verdict, tc.verdict)); err != nil {
						return fmt.Errorf("%s: %w", tc.name, err)
					}
					if cached := sent.tag == tagTranslated; cached != tc.cached {
						return fmt.Errorf("%s: by the former decision %v, want %v", tc.name, cached, tc.cached)
					}
				}
				return nil
			})
			testenv.NoError(t, err)
		})
	}
}

// A packet that ends a connection is not forwarded by a former decision if its flow is gone, or is another container's.
func TestForwardingCacheEndsOnlyItsFlow(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	c := trackedConnections["that the pod opens"]
	end := c.segments[3]
	for name, replace := range map[string]func(bpf.FlowKey, bpf.Flow) error{
		"gone": func(key bpf.FlowKey, _ bpf.Flow) error { return h.flows().Delete(key) },
		"another container's": func(key bpf.FlowKey, flow bpf.Flow) error {
			flow.Owner, flow.NatAddr = owners["pod2"], v4.wire("pod2")
			return errors.Join(h.flows().Delete(key), h.flows().Put(key, flow))
		},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(s.name+" "+name, func(t *testing.T) {
				err := h.on(0, func() error {
					if err := errors.Join(h.start(s, always), h.handshake(&s), h.leave(s, ack, 1001, 5001)); err != nil {
						return err
					}
					all, err := h.flows().all()
					for key, flow := range all {
						err = errors.Join(err, replace(key, flow))
					}
					cached, errEnd := h.pass(s, c, end)
					if cached {
						errEnd = errors.Join(errEnd, errors.New("the former decision was enough"))
					}
					after, errAfter := h.flows().all()
					for key, flow := range after {
						if flow.Owner == owners["pod2"] && flow.Flags&hasFIN != 0 {
							errEnd = errors.Join(errEnd, fmt.Errorf("%+v has ended: %+v", key, flow))
						}
					}
					return errors.Join(err, errEnd, errAfter)
				})
				testenv.NoError(t, err)
			})
		}
	}
}

// The packet that ends an offloaded connection is not forwarded by a former decision: conntrack must know of it.
func TestForwardingCacheLeavesEndsToTheOffload(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	c := trackedConnections["that the pod opens"]
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			err := h.on(0, func() error {
				err := errors.Join(h.start(s, bpf.FastPathEstablished), h.offload(s, podToOutside))
				for i, want := range []trackedSegment{
					fully(pod(ack, 1001, 5001, 0, 0)), cachedly(pod(ack, 1001, 5001, 0, 0)), fully(pod(finack, 1001, 5001, 0, 0)),
				} {
					cached, errPass := h.pass(s, c, want)
					if err = errors.Join(err, errPass); err != nil || cached != want.cached {
						return fmt.Errorf("segment %d: cached is %v, want %v: %w", i, cached, want.cached, err)
					}
				}
				return err
			})
			testenv.NoError(t, err)
		})
	}
}

// The end of an offloaded connection leaves no decision by which the next one on the same ports would bypass the stack.
func TestOffloadEndsWithDecision(t *testing.T) {
	h := newCacheHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			testenv.NoError(t, h.on(0, func() error {
				return errors.Join(h.start(s, bpf.FastPathEstablished), h.offload(s, podToPod),
					h.wantSent(s, "pod", forth, verdictRedirect, func(p *testenv.Packet) { p.TCPFlags = testenv.RST }),
					h.wantSent(s, "pod", forth, verdictNext, bySYN))
			}))
		})
	}
}
