// Package link does the netlink work of the plugin: the veth pair with its
// addresses and routes, the uplinks, and the few sysctls that they need.
// Functions take the handle of the namespace that they change; none changes the
// namespace of the calling goroutine.
package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Kind is the kind of device that a pair is of.
type Kind string

// The kinds. Auto is netkit where the kernel has it.
const (
	Veth   Kind = "veth"
	Netkit Kind = "netkit" // kernel 6.7, where it is configured
	Auto   Kind = "auto"
)

// Pair is a pair of devices: one end on the host, one in the container.
type Pair struct {
	Kind          Kind // "": Veth
	HostName      string
	ContainerName string
	HostIndex     int // set by Create
	HostMAC       net.HardwareAddr
	ContainerMAC  net.HardwareAddr
	MTU           int
	Bridge        int // device that the host's end is a port of; 0: none
	BigTCP        BigTCP
}

// Create makes the pair in one request, both ends down, and sets HostIndex. The
// error wraps unix.EEXIST where one of the names is in use. MAC addresses are
// given, so that udev leaves them as they are.
func (p *Pair) Create(host *netlink.Handle, container netns.NsHandle, alias string) error {
	err := errors.ErrUnsupported
	var device netlink.Link
	if p.Kind == Netkit || p.Kind == Auto {
		device = p.netkit(container)
		if err = host.LinkAdd(device); errors.Is(err, unix.EOPNOTSUPP) && p.Kind == Netkit {
			return fmt.Errorf("%w: %w", ErrNoNetkit, err)
		}
	}
	if errors.Is(err, errors.ErrUnsupported) {
		device = p.veth(container)
		err = host.LinkAdd(device)
	}
	if err != nil {
		return fmt.Errorf("create the %s pair %s and %s: %w", device.Type(), p.HostName, p.ContainerName, err)
	}
	p.HostIndex = device.Attrs().Index
	if err := host.LinkSetAlias(device, alias); err != nil {
		return errors.Join(fmt.Errorf("set the alias of %s: %w", p.HostName, err), Delete(host, p.HostName))
	}
	return nil
}

// ErrNoNetkit says that the kernel has no netkit devices.
var ErrNoNetkit = errors.New("this kernel has no netkit devices (6.7 and CONFIG_NETKIT)")

func (p *Pair) hostAttrs() netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.HostName
	attrs.HardwareAddr = p.HostMAC
	attrs.MTU = p.MTU
	p.BigTCP.set(&attrs)
	return attrs
}

func (p *Pair) veth(container netns.NsHandle) netlink.Link {
	veth := netlink.NewVeth(p.hostAttrs())
	veth.PeerName = p.ContainerName
	veth.PeerNamespace = netlink.NsFd(container)
	veth.PeerHardwareAddr = p.ContainerMAC
	veth.PeerMTU = uint32(p.MTU)
	return veth
}

// netkit has Ethernet headers, as a veth has, and no program of its own: ours are
// where they are with a veth.
func (p *Pair) netkit(container netns.NsHandle) netlink.Link {
	netkit := &netlink.Netkit{
		LinkAttrs:  p.hostAttrs(),
		Mode:       netlink.NETKIT_MODE_L2,
		Policy:     netlink.NETKIT_POLICY_FORWARD,
		PeerPolicy: netlink.NETKIT_POLICY_FORWARD,
	}
	peer := netlink.NewLinkAttrs()
	peer.Name = p.ContainerName
	peer.Namespace = netlink.NsFd(container)
	peer.HardwareAddr = p.ContainerMAC
	peer.MTU = p.MTU
	netkit.SetPeerAttrs(&peer)
	return netkit
}

// Delete removes the device, and with it the other end of a pair. It is no
// error that there is none.
func Delete(host *netlink.Handle, name string) error {
	device, err := Find(host, name)
	if err != nil || device == nil {
		return err
	}
	if err := host.LinkDel(device); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete %s: %w", name, err)
	}
	return nil
}

// Find returns the device, or nil where there is none.
func Find(handle *netlink.Handle, name string) (netlink.Link, error) {
	device, err := handle.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up %s: %w", name, err)
	}
	return device, nil
}

// List returns all devices.
func List(host *netlink.Handle) ([]netlink.Link, error) {
	devices, err := rtnl.Links(host)
	if err != nil {
		return nil, fmt.Errorf("list the host's devices: %w", err)
	}
	return devices, nil
}

// Addresses returns the addresses of a device.
func Addresses(handle *netlink.Handle, device netlink.Link) ([]netip.Prefix, error) {
	found, err := rtnl.Addresses(handle, device, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", device.Attrs().Name, err)
	}
	var all []netip.Prefix
	for _, a := range found {
		addr, _ := netip.AddrFromSlice(a.IP)
		bits, _ := a.Mask.Size()
		all = append(all, netip.PrefixFrom(addr.Unmap(), bits))
	}
	return all, nil
}

// Address is a container's address with the length of its subnet, and the
// gateway that the host answers for.
type Address struct {
	Prefix  netip.Prefix
	Gateway netip.Addr
}

// IsIPv6 says the family.
func (a Address) IsIPv6() bool { return a.Prefix.Addr().Is6() }

const loopback = 1 // always the first device

// addrGenModeNone is IN6_ADDR_GEN_MODE_NONE of linux/if_link.h.
const addrGenModeNone = 1

// RaiseWith brings the host's end up with one address of its own, which the host uses as the
// source of nothing.
func RaiseWith(host *netlink.Handle, p Pair, addr netip.Addr) error {
	own := &netlink.Addr{IPNet: ipNet(hostPrefix(addr)), Scope: int(netlink.SCOPE_HOST), Flags: unix.IFA_F_NOPREFIXROUTE}
	if err := host.AddrAdd(deviceOf(p.HostIndex), own); err != nil {
		return fmt.Errorf("add address %s to %s: %w", addr, p.HostName, err)
	}
	return raise(host, p)
}

func raise(host *netlink.Handle, p Pair) error {
	if err := host.LinkSetUp(deviceOf(p.HostIndex)); err != nil {
		return fmt.Errorf("set %s up: %w", p.HostName, err)
	}
	return nil
}

// SetUpHost brings the host's end up: it gets each gateway as its own address,
// which the kernel then answers ARP, neighbour solicitations and pings for, and
// a route to each container address. All of it goes with the device.
func SetUpHost(host *netlink.Handle, p Pair, addresses []Address) error {
	device := deviceOf(p.HostIndex)
	own, err := hostAddresses(host, device, addresses)
	if err != nil {
		return fmt.Errorf("set %s to make no link-local address: %w", p.HostName, err)
	}
	for _, addr := range own {
		if err := addAddress(host, device, hostPrefix(addr)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add address %s to %s: %w", addr, p.HostName, err)
		}
	}
	if err := raise(host, p); err != nil {
		return err
	}
	for _, address := range addresses {
		route := &netlink.Route{
			LinkIndex: p.HostIndex,
			Dst:       ipNet(hostPrefix(address.Prefix.Addr())),
			Scope:     netlink.SCOPE_LINK,
		}
		if err := host.RouteAdd(route); err != nil {
			return fmt.Errorf("add a route to %s by %s: %w", address.Prefix.Addr(), p.HostName, err)
		}
	}
	return nil
}

// hostAddresses returns the addresses for the host's end: the gateways, and for
// IPv6 a link-local one, since the kernel asks for a neighbour in no other name
// when it forwards. It is a fixed one, usable at once; the kernel is told not
// to make its own, which would be unusable while it looks for a duplicate.
func hostAddresses(host *netlink.Handle, device *netlink.GenericLink, addresses []Address) ([]netip.Addr, error) {
	var own []netip.Addr
	for _, address := range addresses {
		if !slices.Contains(own, address.Gateway) {
			own = append(own, address.Gateway)
		}
	}
	if !slices.ContainsFunc(addresses, Address.IsIPv6) {
		return own, nil
	}
	if !slices.Contains(own, hostLinkLocal) {
		own = append(own, hostLinkLocal)
	}
	return own, host.LinkSetIP6AddrGenMode(device, addrGenModeNone)
}

var hostLinkLocal = netip.MustParseAddr("fe80::1")

// SetUpContainer brings the container's end and its loopback device up, with
// the addresses and routes. As with the ptp plugin an address has its subnet's
// length, but everything except the gateway is reached by the gateway.
func SetUpContainer(ns netns.NsHandle, container *netlink.Handle, p Pair, addresses []Address, routes []*cnitypes.Route) error {
	found, err := Find(container, p.ContainerName)
	if err != nil {
		return err
	}
	if found == nil {
		return fmt.Errorf("%s is not in the container any more", p.ContainerName)
	}
	device := deviceOf(found.Attrs().Index)
	if err := p.BigTCP.raise(container, device); err != nil {
		return fmt.Errorf("raise the size of TCP's packets on %s to %d: %w", p.ContainerName, bigTCP, err)
	}
	for _, address := range addresses {
		if err := addContainerAddress(ns, container, device, p.ContainerName, address); err != nil {
			return err
		}
	}
	for _, index := range []int{loopback, device.Index} {
		if err := container.LinkSetUp(deviceOf(index)); err != nil {
			return fmt.Errorf("set device %d of the container up: %w", index, err)
		}
	}
	all := ContainerRoutes(device.Index, addresses, routes)
	p.leaveRoomForJumbo(all)
	return addRoutes(container, all)
}

// addRoutes puts a route behind one that another interface of the container has
// already, unless its priority was asked for.
func addRoutes(container *netlink.Handle, routes []netlink.Route) error {
	const behind = 2048 // twice IPv6's default

	type place struct {
		dst             string
		table, priority int
	}
	ours := map[place]bool{}
	for _, route := range routes {
		at := place{route.Dst.String(), route.Table, route.Priority}
		err := container.RouteAdd(&route)
		if errors.Is(err, unix.EEXIST) && !ours[at] && route.Priority == 0 {
			route.Priority = behind + route.LinkIndex
			err = container.RouteAdd(&route)
		}
		if err != nil {
			return fmt.Errorf("add route %v to the container: %w", route, err)
		}
		ours[at] = true
	}
	return nil
}

// addContainerAddress also turns IPv6 on where the container's namespace was
// made without, as Docker and others do: the address was asked for.
func addContainerAddress(ns netns.NsHandle, container *netlink.Handle, device *netlink.GenericLink, name string, address Address) error {
	err := addAddress(container, device, address.Prefix)
	if address.IsIPv6() && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)) {
		if err := writeSysctlIn(ns, "ipv6/conf/"+name+"/disable_ipv6", "0"); err != nil {
			return fmt.Errorf("turn IPv6 on for %s: %w", name, err)
		}
		err = addAddress(container, device, address.Prefix)
	}
	if err != nil {
		return fmt.Errorf("add %s to %s in the container: %w", address.Prefix, name, err)
	}
	return nil
}

// ContainerRoutes returns all routes of the container: to each gateway, to the
// subnets by their gateways, and those asked for. A route without a gateway
// gets that of the first address of its family.
func ContainerRoutes(ifindex int, addresses []Address, routes []*cnitypes.Route) []netlink.Route {
	var toGateways, others []netlink.Route
	for _, address := range addresses {
		if !address.Gateway.IsValid() {
			continue
		}
		toGateways = append(toGateways, netlink.Route{
			LinkIndex: ifindex,
			Dst:       ipNet(hostPrefix(address.Gateway)),
			Scope:     netlink.SCOPE_LINK,
		})
		if subnet := address.Prefix.Masked(); !subnet.IsSingleIP() {
			others = append(others, netlink.Route{
				LinkIndex: ifindex,
				Dst:       ipNet(subnet),
				Gw:        address.Gateway.AsSlice(),
				Src:       address.Prefix.Addr().AsSlice(),
			})
		}
	}
	for _, route := range routes {
		others = append(others, containerRoute(ifindex, addresses, route))
	}
	return append(toGateways, others...)
}

// RoutesTo returns the routes that have the destination, device and table of a wanted one.
func RoutesTo(handle *netlink.Handle, want netlink.Route) ([]netlink.Route, error) {
	family := netlink.FAMILY_V4
	if want.Dst.IP.To4() == nil {
		family = netlink.FAMILY_V6
	}
	mask := netlink.RT_FILTER_DST | netlink.RT_FILTER_OIF
	if want.Table != 0 {
		mask |= netlink.RT_FILTER_TABLE // else the main one
	}
	found, err := rtnl.Routes(handle, family, &want, mask)
	if err != nil {
		return nil, fmt.Errorf("list the routes to %s: %w", want.Dst, err)
	}
	return found, nil
}

func containerRoute(ifindex int, addresses []Address, asked *cnitypes.Route) netlink.Route {
	route := netlink.Route{
		LinkIndex: ifindex,
		Dst:       &asked.Dst,
		Gw:        asked.GW,
		MTU:       asked.MTU,
		AdvMSS:    asked.AdvMSS,
		Priority:  asked.Priority,
	}
	if asked.Table != nil {
		route.Table = *asked.Table
	}
	if asked.Scope != nil {
		route.Scope = netlink.Scope(*asked.Scope)
	}
	if route.Gw == nil && route.Scope != netlink.SCOPE_LINK {
		route.Gw = gatewayFor(asked, addresses)
	}
	return route
}

func gatewayFor(route *cnitypes.Route, addresses []Address) net.IP {
	ipv6 := route.Dst.IP.To4() == nil
	for _, address := range addresses {
		if address.IsIPv6() == ipv6 {
			return address.Gateway.AsSlice()
		}
	}
	return nil
}

// addAddress adds the address alone: no route to its subnet is made of it, and
// no time is spent on detecting duplicates, since IPAM gives each out once.
func addAddress(handle *netlink.Handle, device *netlink.GenericLink, prefix netip.Prefix) error {
	return handle.AddrAdd(device, &netlink.Addr{
		IPNet: ipNet(prefix),
		Flags: unix.IFA_F_NOPREFIXROUTE | unix.IFA_F_NODAD,
	})
}

func deviceOf(index int) *netlink.GenericLink {
	return &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

func hostPrefix(addr netip.Addr) netip.Prefix {
	return netip.PrefixFrom(addr, addr.BitLen())
}

// ipNet keeps the bits of the host, which netlink needs in addresses.
func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{
		IP:   prefix.Addr().AsSlice(),
		Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
	}
}
