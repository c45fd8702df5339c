package rtnl

import (
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// serialize returns a route's message as the kernel would list it.
func serialize(protocol uint8, route NodeRoute) []byte {
	header, attrs := (&NodeRoutes{protocol: protocol}).message(route)
	message := slices.Clone(header.Serialize())
	for _, attr := range attrs {
		message = append(message, attr.Serialize()...)
	}
	return message
}

// TestNodeRoute reads each kind of route as it was written.
func TestNodeRoute(t *testing.T) {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	for name, route := range map[string]NodeRoute{
		"IPv4 over IPv4": {Prefix: prefix("10.244.2.0/24"), Device: 7, Source: addr("10.244.1.1"),
			Tunnel: Tunnel{ID: 0xabcdef, Local: addr("192.0.2.1"), Remote: addr("192.0.2.2")}},
		"IPv6 over IPv4": {Prefix: prefix("fd44:2::/64"), Device: 7, Source: addr("fd44:1::1"),
			Tunnel: Tunnel{ID: 1, Remote: addr("192.0.2.2")}},
		"IPv4 over IPv6": {Prefix: prefix("10.244.2.0/24"), Device: 7, MTU: 1430,
			Tunnel: Tunnel{ID: 1, Local: addr("2001:db8::1"), Remote: addr("2001:db8::2"), Checksum: true}},
		"IPv6 over IPv6": {Prefix: prefix("fd44:2::/64"), Device: 7,
			Tunnel: Tunnel{ID: 1, Local: addr("2001:db8::1"), Remote: addr("2001:db8::2"), Checksum: true}},
		"IPv4, neighbor": {Prefix: prefix("10.244.2.0/24"), Device: 2, Gateway: addr("192.0.2.2")},
		"IPv6, neighbor": {Prefix: prefix("fd44:2::/64"), Metric: 1024, Device: 2, Gateway: addr("2001:db8::2"), MTU: 1400},
		"IPv4, refused":  {Prefix: prefix("10.244.0.0/16"), Metric: math.MaxUint32, Unreachable: true},
		"IPv6, refused":  {Prefix: prefix("fd44::/48"), Metric: math.MaxUint32, Unreachable: true},
	} {
		got, ok, err := (&NodeRoutes{protocol: NodeProtocol}).parse(serialize(NodeProtocol, route), uint8(nl.GetIPFamily(route.Prefix.Addr().AsSlice())))
		if err != nil || !ok || got != route {
			t.Errorf("%s: got %+v, %v (%v), want %+v", name, got, ok, err, route)
		}
	}
}

// TestNodeRouteOfOthers leaves alone what has another protocol, what the kernel keeps for itself, and what it lists
// beside the family that was asked for.
func TestNodeRouteOfOthers(t *testing.T) {
	route := NodeRoute{Prefix: netip.MustParsePrefix("fd44:2::/64"), Device: 2}
	ours := &NodeRoutes{protocol: NodeProtocol}
	if got, ok, err := ours.parse(serialize(unix.RTPROT_BOOT, route), unix.AF_INET6); ok || err != nil {
		t.Errorf("protocol boot: got %+v, %v (%v), want none", got, ok, err)
	}
	cloned := serialize(NodeProtocol, route)
	nl.DeserializeRtMsg(cloned).Flags = unix.RTM_F_CLONED
	if got, ok, err := ours.parse(cloned, unix.AF_INET6); ok || err != nil {
		t.Errorf("cloned: got %+v, %v (%v), want none", got, ok, err)
	}
	if got, ok, err := ours.parse(serialize(NodeProtocol, route), unix.AF_INET); ok || err != nil {
		t.Errorf("another family: got %+v, %v (%v), want none", got, ok, err)
	}
}
