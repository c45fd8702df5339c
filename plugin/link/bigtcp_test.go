package link

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// TestSizesOfUplink has an uplink on kernels that report less of it.
func TestSizesOfUplink(t *testing.T) {
	for name, test := range map[string]struct {
		uplink netlink.LinkAttrs
		whole  BigTCP // of largest
	}{
		"5.10":         {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535}, BigTCP{}},
		"5.10, small":  {netlink.LinkAttrs{GSOMaxSize: 16384, GSOMaxSegs: 65535}, BigTCP{}},
		"6.1":          {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535}, BigTCP{}},
		"6.1, raised":  {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 65535}, BigTCP{IPv6: bigTCP}},
		"6.12":         {netlink.LinkAttrs{GSOMaxSize: 65536, GSOMaxSegs: 65535, GSOIPv4MaxSize: 65536}, BigTCP{}},
		"6.12, raised": {netlink.LinkAttrs{GSOMaxSize: 524280, GSOMaxSegs: 65535, GSOIPv4MaxSize: 524280}, largest},
		"by half":      {netlink.LinkAttrs{GSOMaxSize: 99999, GSOMaxSegs: 65535, GSOIPv4MaxSize: 70000}, BigTCP{99999, 70000}},
		"segments":     {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 100, GSOIPv4MaxSize: 70000}, BigTCP{144800, 70000}},
		"few segments": {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 16, GSOIPv4MaxSize: bigTCP}, BigTCP{}},
		"136 segments": {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 136, GSOIPv4MaxSize: bigTCP}, largest},
		"max segments": {netlink.LinkAttrs{GSOMaxSize: bigTCP, GSOMaxSegs: 1<<32 - 1, GSOIPv4MaxSize: bigTCP}, largest},
	} {
		if whole := largest.min(wholeBy(&test.uplink)); whole != test.whole {
			t.Errorf("%s: takes %+v bytes whole, want %+v", name, whole, test.whole)
		}
	}
}

// TestJumboNeedsRoom has MTUs that leave no room for the jumbo header.
func TestJumboNeedsRoom(t *testing.T) {
	for mtu, want := range map[int]BigTCP{1500: largest, 1288: largest, 1287: {IPv4: bigTCP}} {
		if got := largest.forMTU(mtu); got != want {
			t.Errorf("MTU %d: got %+v, want %+v", mtu, got, want)
		}
	}
}
