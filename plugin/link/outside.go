package link

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// Outside is what the host's default routes, and their devices, are good for.
type Outside struct {
	MTU    int // of the routes, the smaller one where the families differ; that of Ethernet without a route
	BigTCP BigTCP
}

// BigTCP is how large the packets are that TCP hands to a device, which makes those
// of the wire of them: bytes, or 0 for what the kernel does by itself (64 KiB).
type BigTCP struct {
	IPv6, IPv4 uint32
}

// bigTCP is three times the usual. With more, packets have no room for so many pages.
const bigTCP = 192 << 10

// FindOutside asks the routing table for the ways to the outside.
func FindOutside(host *netlink.Handle) (Outside, error) {
	const ethernet = 1500

	found := Outside{BigTCP: bigTCPOfKernel(host)}
	for _, ip := range outside {
		routes, err := host.RouteGet(ip)
		if err != nil || len(routes) == 0 {
			continue // no default route
		}
		device, err := Device(host, routes[0].LinkIndex)
		if err != nil {
			return Outside{}, fmt.Errorf("look up the device of the default route: %w", err)
		}
		if device == nil {
			continue
		}
		mtu := routes[0].MTU
		if mtu == 0 {
			mtu = device.Attrs().MTU
		}
		if found.MTU == 0 || mtu < found.MTU {
			found.MTU = mtu
		}
		if device.Attrs().TSOMaxSize < bigTCP { // the host's CPU would have to cut what its hardware cannot
			found.BigTCP = BigTCP{}
		}
	}
	if found.MTU == 0 {
		found.MTU = ethernet
	}
	return found, nil
}

// bigTCPOfKernel looks at loopback: a kernel describes every device with the limits that it
// knows (5.19 for IPv6, 6.3 for IPv4).
func bigTCPOfKernel(host *netlink.Handle) BigTCP {
	const loopback = 1

	device, err := Device(host, loopback)
	if err != nil || device == nil || device.Attrs().TSOMaxSize == 0 {
		return BigTCP{}
	}
	sizes := BigTCP{IPv6: bigTCP}
	if device.Attrs().GSOIPv4MaxSize != 0 {
		sizes.IPv4 = bigTCP
	}
	return sizes
}

// For returns what a device of an MTU can have: IPv6 leaves nobody less than 1280 bytes (RFC 8200, 5).
func (b BigTCP) For(mtu int) BigTCP {
	if mtu < 1280+jumboHeader {
		b.IPv6 = 0
	}
	return b
}

// set puts the sizes, as far as they differ from the kernel's, into what is asked of a device.
func (b BigTCP) set(attrs *netlink.LinkAttrs) {
	attrs.GSOMaxSize, attrs.GROMaxSize = b.IPv6, b.IPv6
	attrs.GSOIPv4MaxSize, attrs.GROIPv4MaxSize = b.IPv4, b.IPv4
}

// raise sets the sizes of a device that is there, and may be up: the library's way to set all
// at once names the device, which older kernels (before 6.2) take for a change of its name.
func (b BigTCP) raise(handle *netlink.Handle, device netlink.Link) error {
	for _, size := range []struct {
		set   func(netlink.Link, int) error
		bytes uint32
	}{
		{handle.LinkSetGSOMaxSize, b.IPv6}, {handle.LinkSetGROMaxSize, b.IPv6},
		{handle.LinkSetGSOIPv4MaxSize, b.IPv4}, {handle.LinkSetGROIPv4MaxSize, b.IPv4},
	} {
		if size.bytes == 0 {
			continue
		}
		if err := size.set(device, int(size.bytes)); err != nil {
			return err
		}
	}
	return nil
}

// leaveRoomForJumbo makes IPv6 segments shorter by the header that longer packets have in the
// place of a length (RFC 2675). It goes when they are cut, but a kernel that forwards them
// counts it, and would find each segment too long.
func (p Pair) leaveRoomForJumbo(routes []netlink.Route) {
	if p.BigTCP.IPv6 == 0 {
		return
	}
	for i := range routes {
		if routes[i].Dst.IP.To4() == nil && routes[i].MTU == 0 {
			routes[i].MTU = p.MTU - jumboHeader
		}
	}
}

const jumboHeader = 8
