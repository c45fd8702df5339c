package policies

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// TestDevicesOf has pods a and b, of which b may have an address that a's status still has.
func TestDevicesOf(t *testing.T) {
	addr := netip.MustParseAddr("10.0.0.1")
	a, b, isolating := maps.PodToken("a"), maps.PodToken("b"), &Rules{Sets: [2]*maps.RuleSet{{Host: true}}}
	policies := []maps.Policy{{Index: 1, Owner: 9, Egress: 1}, {Index: 2, Owner: a, IsPod: true}, {Index: 3, Owner: b, IsPod: true, Ingress: 1}}
	for name, test := range map[string]struct {
		device      maps.Device
		pods        map[loader.Owner]*Rules
		policy      maps.PolicyIndex
		isIsolating bool
	}{
		"the first policy":           {maps.Device{Container: maps.Container(a), IsPod: true, Policy: 1}, map[loader.Owner]*Rules{a: isolating}, 2, true},
		"another pod's address":      {maps.Device{Container: maps.Container(b), IsPod: true}, map[loader.Owner]*Rules{a: isolating}, 0, false},
		"another's, and its own":     {maps.Device{Container: maps.Container(b), IsPod: true}, map[loader.Owner]*Rules{a: isolating, b: isolating}, 3, true},
		"another's rules":            {maps.Device{Container: maps.Container(b), IsPod: true, Policy: 2}, map[loader.Owner]*Rules{a: isolating, b: isolating}, 3, true},
		"isolated before":            {maps.Device{Container: maps.Container(b), IsPod: true, Policy: 3}, map[loader.Owner]*Rules{b: isolating}, 3, false},
		"no policy any more":         {maps.Device{Container: maps.Container(b), IsPod: true, Policy: 3}, nil, 1, false},
		"no room":                    {maps.Device{Container: maps.Container(maps.PodToken("c")), IsPod: true, Policy: 1}, map[loader.Owner]*Rules{maps.PodToken("c"): isolating}, 1, true},
		"of an older plugin":         {maps.Device{Container: 7}, map[loader.Owner]*Rules{a: isolating}, 2, true},
		"of an older plugin, by ADD": {maps.Device{Container: 7, Policy: 3}, map[loader.Owner]*Rules{a: isolating, b: isolating}, 3, false},
	} {
		test.device.Owner, test.device.Addr4 = 9, addr
		want := &Present{Pods: test.pods, Own: map[netip.Addr]loader.Owner{addr: a}, Released: map[loader.Owner]bool{b: true}}
		moved, isolated := devicesOf([]maps.Device{test.device}, policies, want)
		got := test.device.Policy
		for _, device := range moved {
			got = device.Policy
		}
		if got != test.policy || len(isolated) == 1 != test.isIsolating {
			t.Errorf("%s: got policy %d, and %d devices that become isolated; want %d, %t", name, got, len(isolated), test.policy, test.isIsolating)
		}
	}
}
