package link

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// BigTCPMode says where TCP packets over 64 KiB are used.
type BigTCPMode string

// The modes. A socket takes its packets' size from the container's device, whatever the destination, so
// a size for the host's containers is one for the outside, too.
const (
	BigTCPAuto   BigTCPMode = "auto"          // where every uplink takes them whole
	BigTCPRaise  BigTCPMode = "raise-uplinks" // the same, after the uplinks' own sizes are raised
	BigTCPAlways BigTCPMode = "always"        // even where the kernel cuts them for an uplink
	BigTCPNever  BigTCPMode = "never"
)

// BigTCPModes are all modes.
var BigTCPModes = []BigTCPMode{BigTCPAuto, BigTCPRaise, BigTCPAlways, BigTCPNever}

// BigTCP has the largest TCP packets of a device, in bytes. 0 leaves the kernel's default of 64 KiB.
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

// Largest is the BigTCP of a kernel and uplinks that take all.
var Largest = BigTCP{IPv6: bigTCP, IPv4: bigTCP}

// least returns the smaller size of each family. What is no more than the default becomes 0.
func (b BigTCP) least(other BigTCP) BigTCP {
	return BigTCP{IPv6: above(min(b.IPv6, other.IPv6)), IPv4: above(min(b.IPv4, other.IPv4))}
}

func above(size uint32) uint32 {
	if size <= defaultSize {
		return 0
	}
	return size
}

// exceeds returns whether b has a larger size than other, for either family.
func (b BigTCP) exceeds(other BigTCP) bool { return b != b.least(other) }

// InKernel lowers the sizes to those that the kernel supports. It looks at lo, because a kernel reports
// for every device the limits that it knows (IPv6: 5.19, IPv4: 6.3).
func (b BigTCP) InKernel(host *netlink.Handle) (BigTCP, error) {
	device, err := Device(host, loopback)
	if err != nil || device == nil {
		return BigTCP{}, err
	}
	return b.least(mostOf(device.Attrs())), nil
}

// mostOf returns the sizes to which a device's own can be raised.
func mostOf(device *netlink.LinkAttrs) (most BigTCP) {
	most.IPv6 = device.TSOMaxSize // none before 5.19
	if device.GSOIPv4MaxSize != 0 {
		most.IPv4 = device.TSOMaxSize
	}
	return most
}

// wholeBy returns the packets that a device takes whole at present. The kernel cuts a longer packet, or
// one of more segments, into single frames (gso_features_check), whatever the hardware could do.
func wholeBy(device *netlink.LinkAttrs) BigTCP {
	bySegments := uint32(min(uint64(device.GSOMaxSegs)*segment, bigTCP))
	return BigTCP{IPv6: min(device.GSOMaxSize, bySegments), IPv4: min(device.GSOIPv4MaxSize, bySegments)}
}

// Within lowers the sizes to what all uplinks take whole at present, with the devices below them, but for tunnels
// to other nodes.
// narrowest is the device that allows no more, or "". Where one takes just the default, it looks no further.
func (b BigTCP) Within(host *netlink.Handle, uplinks []int) (fits BigTCP, narrowest string, err error) {
	fits = b
	for _, index := range uplinks {
		if fits == (BigTCP{}) {
			break
		}
		err := forEachBelow(host, index, func(device *netlink.LinkAttrs) (bool, error) {
			if whole := wholeBy(device); fits.exceeds(whole) {
				fits, narrowest = fits.least(whole), device.Name
			}
			return fits != BigTCP{}, nil
		})
		if err != nil {
			return BigTCP{}, "", err
		}
	}
	return fits, narrowest, nil
}

// RaiseUplinks raises the uplinks' own sizes, and those of the devices below them, as far as their hardware
// allows. It returns the names of those that had smaller ones.
func (b BigTCP) RaiseUplinks(host *netlink.Handle, uplinks []int) (raised []string, err error) {
	var errs []error
	for _, index := range uplinks {
		errs = append(errs, forEachBelow(host, index, func(device *netlink.LinkAttrs) (bool, error) {
			wanted, present := b.least(mostOf(device)), BigTCP{device.GSOMaxSize, device.GSOIPv4MaxSize}
			wanted.IPv6, wanted.IPv4 = max(wanted.IPv6, present.IPv6), max(wanted.IPv4, present.IPv4)
			if wanted == present {
				return true, nil
			}
			if err := rtnl.SetSizes(device.Index, sizesOfGSO(wanted)); err != nil {
				return true, fmt.Errorf("raise the GSO sizes of uplink %s: %w", device.Name, err)
			}
			raised = append(raised, device.Name)
			return true, nil
		}))
	}
	return raised, errors.Join(errs...)
}

// forEachBelow calls visit with a device and those that its packets pass then: the device that a VLAN or
// tunnel is on, and the ports of a bridge or bond. It ends where visit returns false.
func forEachBelow(host *netlink.Handle, index int, visit func(*netlink.LinkAttrs) (bool, error)) error {
	const mostLevels = 5 // a tunnel on a VLAN on a bridge on a bond

	level := []int{index}
	for range mostLevels {
		var next []int
		for _, index := range level {
			device, err := Device(host, index)
			if err != nil {
				return err
			}
			if device == nil || reachesNodes(device) {
				continue
			}
			goOn, err := visit(device.Attrs())
			if err != nil || !goOn {
				return err
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

// reachesNodes returns whether a device is a tunnel that gets the remote with each packet, as to other nodes of a cluster.
// Its size does not count: the kernel cuts for it what is longer, up to 6.18 it takes no larger one, and only
// packets to other nodes pass it.
func reachesNodes(device netlink.Link) bool {
	tunnel, ok := device.(*netlink.Vxlan)
	return ok && tunnel.FlowBased
}

// devicesBelow returns the devices directly below another. Only a bridge or bond costs a list of devices;
// an ADD gets that far only if somebody has raised its size.
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

// For returns the sizes for a device with that MTU. leaveRoomForJumbo lowers the MTU of
// IPv6 routes, which must not fall below 1280 bytes (RFC 8200, section 5).
func (b BigTCP) For(mtu int) BigTCP {
	if mtu < 1280+jumboHeader {
		b.IPv6 = 0
	}
	return b
}

// SizePackets sets the sizes of the host's end. SetUpContainer does the container's. follows says that
// LowerPackets may lower them later: the mark of that is the GRO size of the host's end, which
// limits what may be merged of the container's packets, so its right value is the same.
func (p *Pair) SizePackets(sizes BigTCP, follows bool) error {
	if p.BigTCP = sizes; sizes == (BigTCP{}) {
		return nil
	}
	all := sizesOfGSO(sizes)
	if follows {
		all = append(all, sizesOfGRO(sizes)...)
	}
	if err := rtnl.SetSizes(p.HostIndex, all); err != nil {
		return fmt.Errorf("raise the GSO and GRO sizes of %s: %w", p.HostName, err)
	}
	return nil
}

// setGSO sets the sizes of the container's end, which may be up. The kernel lowers the size for IPv4 with
// the one for IPv6, so that goes first. The library can also set both at once, but then sends the
// device's name, which kernels before 6.2 take for a rename.
func (b BigTCP) setGSO(container *netlink.Handle, device netlink.Link) error {
	if b.IPv6 != 0 {
		if err := container.LinkSetGSOMaxSize(device, int(b.IPv6)); err != nil {
			return err
		}
	}
	if b.IPv4 != 0 {
		return container.LinkSetGSOIPv4MaxSize(device, int(b.IPv4))
	}
	return nil
}

func sizesOfGSO(b BigTCP) rtnl.Sizes {
	return rtnl.Sizes{{Attr: unix.IFLA_GSO_MAX_SIZE, Bytes: b.IPv6}, {Attr: unix.IFLA_GSO_IPV4_MAX_SIZE, Bytes: b.IPv4}}
}

func sizesOfGRO(b BigTCP) rtnl.Sizes {
	return rtnl.Sizes{{Attr: unix.IFLA_GRO_MAX_SIZE, Bytes: b.IPv6}, {Attr: unix.IFLA_GRO_IPV4_MAX_SIZE, Bytes: b.IPv4}}
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
