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
	a, b, c, isolating := maps.PodToken("a"), maps.PodToken("b"), maps.PodToken("c"), &Rules{Sets: [2]*maps.RuleSet{{Host: true}}}
	type rules = map[loader.Owner]*Rules
	ofA, ofB, ofC, both := rules{a: isolating}, rules{b: isolating}, rules{c: isolating}, rules{a: isolating, b: isolating}
	device := func(pod loader.Owner, policy maps.PolicyIndex) maps.Device {
		return maps.Device{Container: maps.Container(pod), IsPod: true, Policy: policy}
	}
	policies := []maps.Policy{
		{Index: 1, Owner: 9, Egress: 1}, {Index: 2, Owner: a, IsPod: true}, {Index: 3, Owner: b, IsPod: true, Ingress: 1},
	}
	for name, test := range map[string]struct {
		device      maps.Device
		pods        rules
		policy      maps.PolicyIndex
		isIsolating bool
	}{
		"the first policy":           {device(a, 1), ofA, 2, true},
		"another pod's address":      {device(b, 0), ofA, 0, false},
		"another's, and its own":     {device(b, 0), both, 3, true},
		"another's rules":            {device(b, 2), both, 3, true},
		"isolated before":            {device(b, 3), ofB, 3, false},
		"no policy any more":         {device(b, 3), nil, 1, false},
		"no room":                    {device(c, 1), ofC, 1, true},
		"of an older plugin":         {maps.Device{Container: 7}, ofA, 2, true},
		"of an older plugin, by ADD": {maps.Device{Container: 7, Policy: 3}, both, 3, false},
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
