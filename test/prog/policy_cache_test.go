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
