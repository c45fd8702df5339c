package link

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// Outside describes the host's default routes and their devices.
type Outside struct {
	MTU    int // bytes: the smaller one of both families; without a default route that of Ethernet
	BigTCP BigTCP
}

// BigTCP has the largest GSO and GRO packets of a device, in bytes. 0 leaves the
// kernel's default of 64 KiB.
type BigTCP struct {
	IPv6, IPv4 uint32
}

// bigTCP is three times the default. A packet has no room for the pages of much more.
const bigTCP = 192 << 10

// FindOutside looks up the host's default routes.
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
		if device.Attrs().TSOMaxSize < bigTCP { // the CPU would have to segment what the hardware cannot
			found.BigTCP = BigTCP{}
		}
	}
	if found.MTU == 0 {
		found.MTU = ethernet
	}
	return found, nil
}

// bigTCPOfKernel returns the sizes that the kernel supports. It looks at lo, because a
// kernel reports for every device the limits that it knows (IPv6: 5.19, IPv4: 6.3).
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

// For returns the sizes for a device with that MTU. leaveRoomForJumbo lowers the MTU of
// IPv6 routes, which must not fall below 1280 bytes (RFC 8200, section 5).
func (b BigTCP) For(mtu int) BigTCP {
	if mtu < 1280+jumboHeader {
		b.IPv6 = 0
	}
	return b
}

// set writes the sizes to the attributes of a new device.
func (b BigTCP) set(attrs *netlink.LinkAttrs) {
	attrs.GSOMaxSize, attrs.GROMaxSize = b.IPv6, b.IPv6
	attrs.GSOIPv4MaxSize, attrs.GROIPv4MaxSize = b.IPv4, b.IPv4
}

// raise sets the sizes of an existing device, which may be up. The library can also set
// all at once, but then sends the device's name, which kernels before 6.2 take for a rename.
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

// leaveRoomForJumbo lowers the MTU of IPv6 routes by the size of the jumbo header, which
// replaces the length of a packet over 64 KiB (RFC 2675). Segmentation removes the header,
// but a forwarding kernel counts it and would find each segment too long.
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
