package link

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// BigTCP has the largest TCP packets of a device, in bytes. 0 leaves the kernel's default of 64 KiB. A socket takes the
// size from the container's device, whatever the destination.
type BigTCP struct {
	IPv6, IPv4 uint32
}

const (
	// bigTCP is three times the default. A packet has no room for the pages of much more.
	bigTCP      = 192 << 10
	defaultSize = 64 << 10
	// segment is the payload of an Ethernet frame with TCP timestamps (IPv6: 20 bytes less).
	segment = 1448
)

// BigTCPFor returns the sizes for a device with an MTU on a host with uplinks.
func BigTCPFor(host *netlink.Handle, mtu int, uplinks []int) (BigTCP, error) {
	sizes, err := largest.forMTU(mtu).within(host, uplinks)
	if err != nil || sizes == (BigTCP{}) {
		return sizes, err
	}
	return sizes.inKernel(host) // not first, since most ADDs end before
}

// largest is the BigTCP of a kernel and uplinks that take all.
var largest = BigTCP{IPv6: bigTCP, IPv4: bigTCP}

// min returns the smaller size of each family. A size up to the default becomes 0.
func (b BigTCP) min(other BigTCP) BigTCP {
	return BigTCP{IPv6: above(min(b.IPv6, other.IPv6)), IPv4: above(min(b.IPv4, other.IPv4))}
}

func above(size uint32) uint32 {
	if size <= defaultSize {
		return 0
	}
	return size
}

// inKernel lowers the sizes to those that the kernel supports. It looks at lo, because a kernel reports
// the limits that it knows for every device (IPv6: 5.19, IPv4: 6.3).
func (b BigTCP) inKernel(host *netlink.Handle) (BigTCP, error) {
	device, err := Device(host, loopback)
	if err != nil || device == nil {
		return BigTCP{}, err
	}
	known := BigTCP{IPv6: device.Attrs().TSOMaxSize}
	if device.Attrs().GSOIPv4MaxSize != 0 {
		known.IPv4 = device.Attrs().TSOMaxSize
	}
	return b.min(known), nil
}

// wholeBy returns the largest packets that a device takes whole at present. The kernel cuts a longer packet, or
// one of more segments, into single frames (gso_features_check), whatever the hardware supports.
func wholeBy(device *netlink.LinkAttrs) BigTCP {
	bySegments := uint32(min(uint64(device.GSOMaxSegs)*segment, bigTCP))
	return BigTCP{IPv6: min(device.GSOMaxSize, bySegments), IPv4: min(device.GSOIPv4MaxSize, bySegments)}
}

// within lowers the sizes to what all uplinks and the devices below them take whole at present. Tunnels to other nodes
// do not count. Without an uplink there is none to ask, and the sizes are the default. It stops at a device that takes
// only the default.
func (b BigTCP) within(host *netlink.Handle, uplinks []int) (fits BigTCP, err error) {
	if len(uplinks) == 0 {
		return BigTCP{}, nil
	}
	fits = b
	for _, index := range uplinks {
		if fits == (BigTCP{}) {
			break
		}
		err := forEachBelow(host, index, func(device *netlink.LinkAttrs) bool {
			fits = fits.min(wholeBy(device))
			return fits != BigTCP{}
		})
		if err != nil {
			return BigTCP{}, err
		}
	}
	return fits, nil
}

// forEachBelow calls visit with a device and with those that its packets pass next: the device that a VLAN or
// tunnel is on, and the ports of a bridge or bond. It stops when visit returns false.
func forEachBelow(host *netlink.Handle, index int, visit func(*netlink.LinkAttrs) bool) error {
	const maxLevels = 5 // a tunnel on a VLAN on a bridge on a bond

	level := []int{index}
	for range maxLevels {
		var next []int
		for _, index := range level {
			device, err := Device(host, index)
			if err != nil {
				return err
			}
			if device == nil || reachesNodes(device) {
				continue
			}
			if !visit(device.Attrs()) {
				return nil
			}
			below, err := devicesBelow(host, device)
			if err != nil {
				return err
			}
			next = append(next, below...)
		}
		level = next
	}
	return nil
}

// reachesNodes reports whether a device is a tunnel that gets the remote with each packet, as one to other nodes of a
// cluster does. Its size is ignored: only packets to other nodes pass it, the kernel cuts longer ones for it, and its
// size cannot be raised (up to Linux 6.18).
func reachesNodes(device netlink.Link) bool {
	tunnel, ok := device.(*netlink.Vxlan)
	return ok && tunnel.FlowBased
}

// devicesBelow returns the devices directly below another. Only a bridge or bond needs a list of all devices;
// an ADD gets that far only if its size is raised.
func devicesBelow(host *netlink.Handle, device netlink.Link) (below []int, err error) {
	attrs := device.Attrs()
	switch device.Type() {
	case string(Veth), string(Netkit):
		return nil, nil // the other end is not below
	case "bridge", "bond", "team":
		devices, err := List(host)
		for _, port := range devices {
			if port.Attrs().MasterIndex == attrs.Index {
				below = append(below, port.Attrs().Index)
			}
		}
		return below, err
	}
	const here = -1 // no id: the device below is in the same namespace
	if attrs.NetNsID == here && attrs.ParentIndex != 0 && attrs.ParentIndex != attrs.Index {
		below = append(below, attrs.ParentIndex)
	}
	return below, nil
}

// forMTU lowers the sizes to those for a device with an MTU. leaveRoomForJumbo lowers the MTU of
// IPv6 routes, which must not fall below 1280 bytes (RFC 8200, section 5).
func (b BigTCP) forMTU(mtu int) BigTCP {
	if mtu < 1280+jumboHeader {
		b.IPv6 = 0
	}
	return b
}

// SizePackets sets the sizes of the host's end. SetUpContainer sets the container's.
func (p *Pair) SizePackets(host *netlink.Handle, sizes BigTCP) error {
	p.BigTCP = sizes
	if err := sizes.set(host, deviceOf(p.HostIndex)); err != nil {
		return fmt.Errorf("raise the GSO sizes of %s: %w", p.HostName, err)
	}
	return nil
}

// set sets the sizes of a device, which may be up. The kernel changes the size for IPv4 with the one for IPv6, so IPv6
// goes first. The library can also set both at once, but then sends the device's name, which kernels before 6.2 take for
// a rename.
func (b BigTCP) set(ns *netlink.Handle, device netlink.Link) error {
	if b.IPv6 != 0 {
		if err := ns.LinkSetGSOMaxSize(device, int(b.IPv6)); err != nil {
			return err
		}
	}
	if b.IPv4 != 0 {
		return ns.LinkSetGSOIPv4MaxSize(device, int(b.IPv4))
	}
	return nil
}

// leaveRoomForJumbo lowers the MTU of IPv6 routes by the size of the jumbo header, which
// replaces the length of a packet over 64 KiB (RFC 2675). Segmentation removes the header,
// but a forwarding kernel counts it and would find each segment too long.
func (p *Pair) leaveRoomForJumbo(routes []netlink.Route) {
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
