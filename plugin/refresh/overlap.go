package refresh

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Overlap is a subnet that another device of the host has, such as the bridge of another container engine, which gives
// out its addresses without our reservations.
type Overlap struct {
	Subnet netip.Prefix
	Device string
	index  int
}

func (o Overlap) String() string { return fmt.Sprintf("%s of device %s", o.Subnet, o.Device) }

// OverlapAt looks up whether another device has the subnet of an address. It is one lookup of a route.
func OverlapAt(host *netlink.Handle, addr netip.Addr) (*Overlap, error) {
	routes, err := host.RouteGetWithOptions(addr.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(routes) == 0 {
		return nil, nil // no route leads there
	}
	return overlapOf(host, routes[0])
}

// Overlaps returns the subnets of other devices that overlap these. Unlike OverlapAt it lists routes, and leaves out
// those to one address.
func Overlaps(host *netlink.Handle, subnets []netip.Prefix) (found []Overlap, err error) {
	routes, err := rtnl.Routes(host, netlink.FAMILY_ALL, &netlink.Route{}, 0)
	if err != nil {
		return nil, err
	}
	for _, route := range routes {
		if route.Dst == nil {
			continue
		}
		to := link.PrefixOf(*route.Dst)
		if to.IsSingleIP() || !slices.ContainsFunc(subnets, to.Overlaps) {
			continue
		}
		o, err := overlapOf(host, route)
		if err != nil {
			return nil, err
		}
		if o != nil && !slices.Contains(found, *o) {
			found = append(found, *o)
		}
	}
	return found, nil
}

// overlapOf returns the subnet of a route, if it leads to neighbors on a device that is no container's of ours.
func overlapOf(host *netlink.Handle, route netlink.Route) (*Overlap, error) {
	isNeighbors := route.Type == unix.RTN_UNICAST && route.Gw == nil && route.Via == nil && len(route.MultiPath) == 0
	if route.Dst == nil || link.PrefixOf(*route.Dst).Bits() == 0 || !isNeighbors && route.Type != unix.RTN_LOCAL {
		return nil, nil
	}
	device, err := link.Device(host, route.LinkIndex)
	if err != nil || device == nil || isOurs(device) {
		return nil, err
	}
	return &Overlap{link.PrefixOf(*route.Dst), device.Attrs().Name, device.Attrs().Index}, nil
}

// SharesReservations reports whether the device is a bridge whose containers are ours.
func (o Overlap) SharesReservations(datapath *loader.Datapath) (bool, error) {
	uplinks, err := maps.Uplinks(datapath)
	return slices.ContainsFunc(uplinks, func(u maps.Uplink) bool { return u.ContainerBridge && u.IfIndex == o.index }), err
}

// Answers reports whether somebody on the device has an address. It lets the kernel ask by ARP or neighbor discovery,
// which firewalls of the others do not filter.
func (o Overlap) Answers(host *netlink.Handle, addr netip.Addr) (bool, error) {
	const patience, interval, discard = 300 * time.Millisecond, 10 * time.Millisecond, 9

	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, discard)))
	if err != nil {
		return false, err
	}
	defer conn.Close()
	if _, err := conn.Write(nil); err != nil {
		return false, err
	}
	family := netlink.FAMILY_V6
	if addr.Is4() {
		family = netlink.FAMILY_V4
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(interval) {
		isLast := time.Now().After(deadline)
		neighbors, err := rtnl.Neighbors(host, o.index, family)
		if err != nil {
			return false, err
		}
		const known = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
		if slices.ContainsFunc(neighbors, func(n netlink.Neigh) bool { return n.IP.Equal(addr.AsSlice()) && n.State&known != 0 }) {
			return true, nil
		}
		if isLast {
			return false, nil
		}
	}
}
