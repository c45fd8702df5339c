package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const offloadMoves = 8 // OFFLOAD_MOVES of offload.h

// The host's routes lead an offloaded connection to another uplink. Its packets wait until the last hook there has seen a conntrack
// update, which rules have let pass.
func TestOffloadMovesToAnotherUplink(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	const elsewhere = 1000 // from the uplink's index
	pod := h.devices["pod"]
	for _, side := range []struct {
		text         string
		known        offload
		last         string
		out, ingress *netlink.LinkAttrs
		wire         *capture
	}{
		{"pod:4000 > remote:80", podToOutside, bpf.ProgToUplink, h.uplink, pod, h.capture(t, bpf.ProgFromContainer)},
		{"remote:5000 > pod:80", outsideToPod, bpf.ProgToContainer, pod, h.uplink, h.capture(t, bpf.ProgFromUplink)},
	} {
		wantAt := func(s scene, from int, moves uint8) error {
			got, count, err := h.known(s)
			if err == nil && (count != 1 || int(got.Uplink) != h.uplink.Index+from || got.Moves != moves) {
				err = fmt.Errorf("%d entries, the last one by %d after %d moves, want one by %d after %d", count, got.Uplink, got.Moves, h.uplink.Index+from, moves)
			}
			return err
		}
		update := func(s scene, ingress *netlink.LinkAttrs) error {
			p := h.packet(s, "pod", side.text)
			frame := p.MustBuild()
			frame[map[string]int{"v4": 34, "v6": 54}[s.name]+12] |= 0xe
			verdict, _, err := h.runAt(side.last, side.out, ingress, outcome{tag: tagCTUpdate, frame: frame})
			return errors.Join(err, checkVerdict(verdict, verdictDrop))
		}
		eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
			for _, flag := range []uint8{ack, testenv.FIN | ack, testenv.RST} {
				testenv.Must(t, h.on(0, func() error {
					return errors.Join(
						h.start(s, bpf.FastPathEstablished), h.offload(s, side.known.byAnotherUplink()),
						h.enter(s, side.text, verdictDrop, flags(flag)), wantAt(s, elsewhere, 0),
						update(s, &netlink.LinkAttrs{Index: h.uplink.Index + 2*elsewhere}), wantAt(s, elsewhere, 0),
						h.enter(s, side.text, verdictDrop, flags(flag)),
						update(s, side.ingress), wantAt(s, 0, 1),
						h.enter(s, side.text, verdictRedirect, flags(ack)),
					)
				}))
				if ends := side.wire.updates(2); len(ends) < 2 {
					t.Errorf("%s with flags %#x: %d updates, want 2", side.text, flag, len(ends))
				}
			}
			testenv.Must(t, h.on(0, func() error { // its two directions take different uplinks
				return errors.Join(
					h.start(s, bpf.FastPathEstablished), h.offload(s, side.known.byAnotherUplink().moved(offloadMoves)),
					h.enter(s, side.text, verdictNext, flags(ack)),
				)
			}))
			// It has bypassed the stack there without an entry, so conntrack's numbers are old.
			testenv.Must(t, h.on(0, func() error {
				err := errors.Join(h.start(s, bpf.FastPathEstablished), h.offload(s, side.known))
				toStack := func() error {
					return errors.Join(h.emptyForwardingCache(), h.enter(s, side.text, verdictNext, flags(ack)))
				}
				return errors.Join(err, h.voidWayOf(toStack), h.offload(s, side.known.byAnotherUplink()), toStack())
			}))
		})
	}
}

// voidWayOf marks the only note with which isVoid returns nil.
func (h *host) voidWayOf(isVoid func() error) (err error) {
	notes := h.programs.Maps[bpf.MapStackNotes]
	for _, place := range notePlaces {
		if err = notes.Put(place, bpf.StackNote{Bypassed: ticks(0)}); err != nil {
			return err
		}
		if err = isVoid(); err == nil {
			return nil
		}
		if err := notes.Put(place, bpf.StackNote{}); err != nil {
			return err
		}
	}
	return err
}
