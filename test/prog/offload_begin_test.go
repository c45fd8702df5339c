package prog

import (
	"errors"
	"fmt"
	"maps"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	offloadAfter = 8                // OFFLOAD_AFTER of offload.h
	offloadAt    = offloadAfter + 2 // the packet that is noted, at the latest
)

// known returns the only entry of the offload for the scene's protocol, or none.
func (h *cacheHost) known(s scene) (entry bpf.Offload, count int, err error) {
	all, err := h.flows().offloads(s.number())
	for _, entry = range all {
	}
	return entry, len(all), err
}

// wantKnown wants the states of the only entry, or no entry for 0.
func (h *cacheHost) wantKnown(s scene, states bpf.OffloadState) error {
	entry, count, err := h.known(s)
	if err == nil && (count > 1 || entry.State != states) {
		err = fmt.Errorf("%d entries of the offload, the last one in state %#x, want %#x", count, entry.State, states)
	}
	return err
}

// eachScene runs fn with each of these protocols, and with both families, on the first CPU.
func (h *cacheHost) eachScene(t *testing.T, on []proto, fn func(s scene) error) {
	t.Helper()
	eachScene(t, on, func(t *testing.T, s scene) {
		testenv.NoError(t, h.on(0, func() error { return fn(s) }))
	})
}

// Only a connection that continues gets an entry of the offload, and bypasses the stack.
func TestOffloadBegins(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	h.eachScene(t, withPorts, func(s scene) error {
		if err := h.start(s, bpf.FastPathEstablished); err != nil {
			return err
		}
		for i := range offloadAfter {
			if err := errors.Join(h.bothWays(s, verdictNext), h.wantKnown(s, 0)); err != nil {
				return fmt.Errorf("packet %d: %w", i, err)
			}
		}
		err := error(nil)
		for range offloadAt - offloadAfter {
			err = errors.Join(err, h.sendBothWays(s))
		}
		return errors.Join(err, h.wantKnown(s, both), h.bothWays(s, verdictRedirect))
	})
}

// bothWays delivers a packet of each pod's, and wants both verdicts.
func (h *cacheHost) bothWays(s scene, verdict uint32) error {
	return errors.Join(h.wantDelivered(s, "pod", "pod2", forth, verdict), h.wantDelivered(s, "pod2", "pod", back, verdict))
}

// sendBothWays delivers a packet of each pod's, by the stack or not.
func (h *cacheHost) sendBothWays(s scene) error {
	_, err := h.deliver(s, "pod", "pod2", forth)
	_, replyErr := h.deliver(s, "pod2", "pod", back)
	return errors.Join(err, replyErr)
}

func (h *cacheHost) wantDelivered(s scene, from, to, text string, verdict uint32, edits ...func(*testenv.Packet)) error {
	got, err := h.deliver(s, from, to, text, edits...)
	if err == nil {
		err = checkVerdict(got.verdict, verdict)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	return nil
}

// Packets count that an entry of an older generation has counted.
func TestOffloadCountSurvivesItsEntry(t *testing.T) {
	h := newCacheHost(t)
	h.eachScene(t, withPorts, func(s scene) error {
		err := h.start(s, bpf.FastPathEstablished)
		for i := range 2 * offloadAfter {
			got, sendErr := h.send(s, "pod", forth)
			if early, late := i < offloadAfter, i >= offloadAt-1; err == nil && (early || late) && got.observed() != late {
				err = fmt.Errorf("packet %d: noted is %v, want %v", i, !late, late)
			}
			err = errors.Join(err, sendErr)
			if i%3 == 2 {
				err = errors.Join(err, h.emptyForwardingCache())
			}
		}
		return err
	})
}

// The stack keeps connections of a pod with fastPath never, and nothing is noted of them.
func TestOffloadNeverBegins(t *testing.T) {
	h := newCacheHost(t)
	for _, s := range (row{on: withPorts}).scenes() {
		for _, text := range []string{forth, "pod:4000 > remote:80"} {
			t.Run(s.name+" "+string(s.proto)+" "+text, func(t *testing.T) {
				err := h.on(0, func() error {
					err := errors.Join(h.start(s, bpf.FastPathEstablished), h.putPod(s, "pod", bpf.FastPathNever, nil))
					for i := range 300 { // more than a count has room for
						got, sendErr := h.send(s, "pod", text)
						if err = errors.Join(err, sendErr); err == nil && (got.verdict != verdictNext || got.observed()) {
							err = fmt.Errorf("packet %d: verdict %d, noted %v", i, int32(got.verdict), got.observed())
						}
					}
					return errors.Join(err, h.wantKnown(s, 0))
				})
				testenv.NoError(t, err)
			})
		}
	}
}

// One reply is enough for UDP that goes one way: conntrack does not wait for more.
func TestOffloadOfOneWayUDP(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	for _, f := range addressings {
		for _, before := range []int{1, offloadAfter, 2 * offloadAt} {
			t.Run(fmt.Sprintf("%s, reply after %d", f.name, before), func(t *testing.T) {
				s := scene{addressing: f, proto: udp}
				err := h.on(0, func() error {
					err := h.start(s, bpf.FastPathEstablished)
					for range before {
						err = errors.Join(err, h.wantDelivered(s, "pod", "pod2", forth, verdictNext))
					}
					err = errors.Join(err, h.wantDelivered(s, "pod2", "pod", back, verdictNext))
					for range offloadAt {
						_, sendErr := h.deliver(s, "pod", "pod2", forth)
						err = errors.Join(err, sendErr)
					}
					return errors.Join(err, h.wantDelivered(s, "pod", "pod2", forth, verdictRedirect))
				})
				testenv.NoError(t, err)
			})
		}
	}
}

// Without a reply, it stays with the stack: conntrack forgets it sooner, and rules may depend on that.
func TestOffloadNeedsAReply(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	h.eachScene(t, withPorts, func(s scene) error {
		err := h.start(s, bpf.FastPathEstablished)
		for range 3 * offloadAfter {
			err = errors.Join(err, h.wantDelivered(s, "pod", "pod2", forth, verdictNext))
		}
		// A reply to another connection is none.
		return errors.Join(err, h.wantDelivered(s, "pod2", "pod", "pod2:81 > pod:4000", verdictNext),
			h.wantDelivered(s, "pod", "pod2", forth, verdictNext), h.wantKnown(s, 2*bpf.OffloadDelivered))
	})
}

func flags(flags uint8) func(*testenv.Packet) {
	return func(p *testenv.Packet) { p.TCPFlags, p.Payload = flags, "" }
}

// A handshake on the ports of a connection begins anew: its packets do not bypass the rules, whatever is known
// of the former one, and to which CPU.
func TestOffloadEndsWithANewHandshake(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		for _, tc := range []struct {
			name   string
			before func() error
		}{
			{"offloaded", func() error { return nil }},
			{"offloaded, and redirected a moment ago", func() error { return h.bothWays(s, verdictRedirect) }},
		} {
			t.Run(s.name+" "+tc.name, func(t *testing.T) {
				err := h.on(0, func() error {
					return errors.Join(
						h.start(s, bpf.FastPathEstablished), h.offload(s, podToPod), tc.before(),
						h.wantDelivered(s, "pod", "pod2", forth, verdictNext, flags(syn)),
						h.wantDelivered(s, "pod2", "pod", back, verdictNext, flags(synack)),
						h.wantKnown(s, 0),
						h.bothWays(s, verdictNext),
					)
				})
				testenv.NoError(t, err)
			})
		}
		t.Run(s.name+" offloaded by another CPU's packets, while this one counts", func(t *testing.T) {
			err := h.on(0, func() error {
				return errors.Join(
					h.start(s, bpf.FastPathEstablished), h.bothWays(s, verdictNext), h.offload(s, podToPod),
					h.wantDelivered(s, "pod", "pod2", forth, verdictNext, flags(syn)),
					h.wantDelivered(s, "pod2", "pod", back, verdictNext, flags(synack)),
					h.wantKnown(s, 0),
					h.bothWays(s, verdictNext),
				)
			})
			testenv.NoError(t, err)
		})
	}
}

// Packets on another CPU have had the connection offloaded. This CPU's packets do not return to a conntrack that has
// not seen the numbers of the others.
func TestOffloadHoldsOnEachCPU(t *testing.T) {
	h := newCacheHost(t)
	eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
		err := h.on(0, func() error {
			return errors.Join(
				h.start(s, bpf.FastPathEstablished),
				h.wantSent(s, "pod", forth, verdictNext), h.wantSent(s, "pod", forth, verdictNext),
				h.offload(s, podToPod),
				h.wantSent(s, "pod", forth, verdictRedirect),
			)
		})
		testenv.NoError(t, err)
	})
}

// A conntrack update ends at the last hook, whatever is known of its connection then. A packet that only resembles one
// does not: neither reserved bits nor the tag suffice, which a container can set.
func TestConntrackUpdateEndsAtTheLastHook(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
		testenv.Must(t, h.start(s, bpf.FastPathEstablished))
		for _, to := range []struct {
			program, text string
			receiver      *netlink.LinkAttrs
		}{
			{bpf.ProgToContainer, forth, h.devices["pod2"]},
			{bpf.ProgToUplink, "pod:4000 > remote:80", h.devices["pod"]},
		} {
			for _, row := range []struct {
				tag     uint32
				bits    byte
				verdict uint32
			}{{tagCTUpdate, 0xe, verdictDrop}, {tagCTUpdate, 0, verdictNext}, {0, 0xe, verdictNext}} {
				t.Run(fmt.Sprintf("%s %#x %#x", to.program, row.tag, row.bits), func(t *testing.T) {
					p := h.packet(s, "pod", to.text)
					p.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 9} // the next hop
					frame := p.MustBuild()
					frame[map[string]int{"v4": 34, "v6": 54}[s.name]+12] |= row.bits
					err := h.on(0, func() error {
						sent, err := h.tags.runTagged(h.devices["pod"], row.tag, frame)
						if err = errors.Join(err, checkVerdict(sent.verdict, verdictNext)); err != nil {
							return err
						}
						verdict, _, err := h.runAt(to.program, to.receiver, h.devices["pod"], sent)
						return errors.Join(err, checkVerdict(verdict, row.verdict))
					})
					testenv.NoError(t, err)
				})
			}
		}
	})
}

// What a remote sends from a port that the host could masquerade to is delivered like all else: only what the tag asks for
// is noted for the offload, and every UDP packet beside it.
func TestNothingIsNotedWithoutTheTag(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	h.eachScene(t, withPorts, func(s scene) error {
		arrive := func(tag uint32) error {
			p := h.packet(s, "pod", "remote:5000 > pod:4000")
			verdict, _, err := h.runAt(bpf.ProgToContainer, h.veth, h.uplink, outcome{tag: s.tag(p) | tag, frame: p.MustBuild()})
			return errors.Join(err, checkVerdict(verdict, verdictNext))
		}
		notes := map[bool]int{s.proto == udp: 1}[true]
		return errors.Join(
			h.start(s, bpf.FastPathEstablished), arrive(0), h.wantKnown(s, 0), h.wantNotes(notes),
			arrive(tagObserve), h.wantKnown(s, 2*bpf.OffloadDelivered),
		)
	})
}

// TestNeighborsMakeNoClaims has packets with the host's own address as their source. The kernel drops those of IPv4, but
// forwards those of IPv6. What the uplink has received claims nothing for the host.
func TestNeighborsMakeNoClaims(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	const toStack = "node:5000 > pod:80"
	direct, translated := dnat("node:5000", "pod:80", "pod:80").provisional(), dnat("node:5000", "pod:80", "node:8080").provisional()
	for _, c := range []struct {
		name, forged string
		flag         uint32
		after        []flow
	}{
		{"plain", toStack, 0, []flow{}},
		{"noted", toStack, tagObserve, []flow{}},
		{"routed", toStack, tagPending, []flow{direct}},
		{"by a host port", "node:5000 > node:8080", 0, []flow{translated}},
		{"by a host port, noted", "node:5000 > node:8080", tagObserve, []flow{translated}},
	} {
		for _, s := range (row{on: withPorts}).scenes() {
			t.Run(s.name+" "+string(s.proto)+" "+c.name, func(t *testing.T) {
				pass := func() error {
					if err := h.receive(s, h.packet(s, "pod", c.forged), hop{program: bpf.ProgFromUplink, out: toStack}); err != nil {
						return err
					}
					p := h.packet(s, "pod", toStack)
					verdict, _, err := h.runAt(bpf.ProgToContainer, h.veth, h.uplink, outcome{tag: s.tag(p) | c.flag, frame: p.MustBuild()})
					return errors.Join(err, checkVerdict(verdict, verdictNext))
				}
				err := h.on(0, func() error {
					ports := []hostPort{{host: "any:8080", to: "pod:80"}}
					return errors.Join(h.start(s, bpf.FastPathEstablished), h.fill(s, ports, nil), pass(), h.checkFlows(s, c.after))
				})
				testenv.NoError(t, err)
			})
		}
	}
}

// wantNotes compares the number of notes about tuples.
func (h *cacheHost) wantNotes(want int) error {
	all, err := contents[uint32, uint64](h.programs.Maps[bpf.MapTupleNotes])
	maps.DeleteFunc(all, func(_ uint32, note uint64) bool { return note == 0 })
	if err == nil && len(all) != want {
		err = fmt.Errorf("%d notes about tuples, want %d", len(all), want)
	}
	return err
}

// The stack may route a pod's packets by rules that the fast path cannot follow: before they bypass it, one must have
// left to the next hop of the routing table. A reply to one, by whatever hop, does not show that.
func TestOffloadChecksTheRouteOfThePod(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	const podSide, remoteSide = 2 * bpf.OffloadDelivered, bpf.OffloadDelivered
	h.eachScene(t, withPorts, func(s scene) error {
		leave := func(tag uint32, hop testenv.MAC) error {
			p := h.packet(s, "pod", "pod:4000 > remote:80")
			p.SrcMAC, p.DstMAC = testenv.MAC(h.uplink.HardwareAddr), hop
			verdict, _, err := h.runAt(bpf.ProgToUplink, h.veth, h.veth, outcome{tag: s.tag(p) | tag, frame: p.MustBuild()})
			return errors.Join(err, checkVerdict(verdict, verdictNext))
		}
		arrive := func() error {
			p := h.packet(s, "pod", "remote:80 > pod:4000")
			verdict, _, err := h.runAt(bpf.ProgToContainer, h.veth, h.uplink, outcome{tag: s.tag(p) | tagObserve, frame: p.MustBuild()})
			return errors.Join(err, checkVerdict(verdict, verdictNext))
		}
		byTable, byRule := testenv.MAC{2, 0, 0, 0, 0, 9}, testenv.MAC{2, 0, 0, 0, 0, 8}
		tag := uint32(tagObserve)
		if s.proto == udp {
			tag = 0 // one packet is enough, and may be the only one
		}
		return errors.Join(
			h.start(s, bpf.FastPathEstablished),
			leave(0, byRule), arrive(), arrive(), h.wantKnown(s, remoteSide),
			leave(tagObserve, byRule), h.wantKnown(s, remoteSide),
			leave(tag, byTable), arrive(), h.wantKnown(s, podSide|remoteSide),
		)
	})
}

// Conntrack updates have the numbers of the pod's packets. Anyone can send under a remote's address, and conntrack lets
// too old numbers pass. New ones count when the pod has acknowledged them.
func TestOffloadRecordsTheNumbersOfContainers(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	const old = 3 << 30 // before 0

	for _, ports := range [][2]string{{"pod:4000", "remote:80"}, {"pod:80", "remote:5000"}} { // the pod is side 1, and 0
		eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
			pass := func(program, text string, device, ingress *netlink.LinkAttrs, seq, ack uint32) error {
				p := h.packet(s, "pod", text)
				p.Seq, p.Ack, p.Payload = seq, ack, "12345"
				p.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 9} // the next hop
				verdict, _, err := h.runAt(program, device, ingress, outcome{tag: s.tag(p) | tagObserve, frame: p.MustBuild()})
				return errors.Join(err, checkVerdict(verdict, verdictNext))
			}
			arrive := func(seq, ack uint32) error {
				return pass(bpf.ProgToContainer, ports[1]+" > "+ports[0], h.veth, h.uplink, seq, ack)
			}
			leave := func(seq, ack uint32) error {
				return pass(bpf.ProgToUplink, ports[0]+" > "+ports[1], h.veth, h.veth, seq, ack)
			}
			wantNumbers := func(seq, ack, remoteSeq, remoteAck uint32) error {
				got, _, err := h.known(s)
				pod := int(map[string]int{"pod:4000": 1}[ports[0]])
				numbers := [4]uint32{got.CtAcked[pod], got.CtAck[pod], got.CtAcked[1-pod], got.CtAck[1-pod]}
				if want := [4]uint32{seq, ack, remoteSeq, remoteAck}; err == nil && numbers != want {
					err = fmt.Errorf("numbers of the pod, then of the remote: got %d, want %d", numbers, want)
				}
				return err
			}
			err := h.on(0, func() error {
				return errors.Join(
					h.start(s, bpf.FastPathEstablished),
					arrive(old+1000, old+2000), leave(1000, 2000), h.wantKnown(s, both), wantNumbers(999, 2000, 2000, 1005),
					arrive(old+1000, old+2000), wantNumbers(999, 2000, 2000, 1005),
					arrive(2000, 1005), wantNumbers(999, 2005, 2000, 1005),
					leave(1005, 2010), wantNumbers(999, 2010, 2010, 1010),
					leave(1000, 2000), wantNumbers(999, 2010, 2000, 1010),
				)
			})
			testenv.NoError(t, err)
		})
	}
}
