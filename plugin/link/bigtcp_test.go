package link

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// TestSizesOfUplink has an uplink on kernels that report less of it.
func TestSizesOfUplink(t *testing.T) {
	for name, test := range map[string]struct {
		uplink      netlink.LinkAttrs
		whole, most BigTCP // of Largest
	}{
		"5.10":          {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535}, BigTCP{}, BigTCP{}},
		"5.10, small":   {netlink.LinkAttrs{GSOMaxSize: 16384, GSOMaxSegs: 65535}, BigTCP{}, BigTCP{}},
		"6.1":           {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535, TSOMaxSize: 524280}, BigTCP{}, BigTCP{IPv6: bigTCP}},
		"6.1, raised":   {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 65535, TSOMaxSize: 524280}, BigTCP{IPv6: bigTCP}, BigTCP{IPv6: bigTCP}},
		"6.12":          {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535, TSOMaxSize: 524280, GSOIPv4MaxSize: 65536}, BigTCP{}, Largest},
		"6.12, raised":  {netlink.LinkAttrs{GSOMaxSize: 524280, GSOMaxSegs: 65535, TSOMaxSize: 524280, GSOIPv4MaxSize: 524280}, Largest, Largest},
		"by half":       {netlink.LinkAttrs{GSOMaxSize: 99999, GSOMaxSegs: 65535, TSOMaxSize: 99999, GSOIPv4MaxSize: 70000}, BigTCP{99999, 70000}, BigTCP{99999, 99999}},
		"segments":      {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 100, TSOMaxSize: bigTCP, GSOIPv4MaxSize: 70000}, BigTCP{144800, 70000}, Largest},
		"few segments":  {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 16, TSOMaxSize: bigTCP, GSOIPv4MaxSize: bigTCP}, BigTCP{}, Largest},
		"136 segments":  {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 136, TSOMaxSize: bigTCP, GSOIPv4MaxSize: bigTCP}, Largest, Largest},
		"old hardware":  {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535, TSOMaxSize: 65536, GSOIPv4MaxSize: 65536}, BigTCP{}, BigTCP{}},
		"most segments": {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 1<<32 - 1, TSOMaxSize: bigTCP, GSOIPv4MaxSize: bigTCP}, Largest, Largest},
	} {
		if whole := Largest.least(wholeBy(&test.uplink)); whole != test.whole {
			t.Errorf("%s: takes %+v bytes whole, want %+v", name, whole, test.whole)
		}
		if most := Largest.least(mostOf(&test.uplink)); most != test.most {
			t.Errorf("%s: can be raised to %+v bytes, want %+v", name, most, test.most)
		}
	}
}

// TestJumboNeedsRoom has MTUs that leave no room for the jumbo header.
func TestJumboNeedsRoom(t *testing.T) {
	for mtu, want := range map[int]BigTCP{1500: Largest, 1288: Largest, 1287: {IPv4: bigTCP}} {
		if got := Largest.For(mtu); got != want {
			t.Errorf("MTU %d: got %+v, want %+v", mtu, got, want)
		}
	}
}
