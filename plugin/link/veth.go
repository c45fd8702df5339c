// Package link does the plugin's netlink work: the pair of devices with its addresses, routes and rate limits, the
// host's uplinks, and the required sysctls. A function takes the handle of the namespace that it works in. No function
// changes the namespace of the calling goroutine.
//
// It imports loader for the types of devices, and loader/rtnl. It does not depend on configurations and maps.
package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Kind is the type of a pair's devices.
type Kind string

// The kinds. Auto is netkit if the kernel has it, otherwise veth.
const (
	Veth   Kind = "veth"
	Netkit Kind = "netkit" // kernel 6.7 with CONFIG_NETKIT
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
	Bridge        int    // ifindex of the bridge that the host's end is a port of; 0: none
	BigTCP        BigTCP // set by SizePackets
}

// Create creates the pair in one request, with both ends down, and sets HostIndex. The error wraps unix.EEXIST if one
// of the names is in use, and ErrNoNetkit if the kernel lacks the kind. Create sets the MAC addresses in the same
// request, so that udev does not change them.
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

// ErrNoNetkit is the error for kernels without netkit devices.
var ErrNoNetkit = errors.New("the kernel has no netkit devices (needs 6.7 and CONFIG_NETKIT)")

func (p *Pair) hostAttrs() netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.HostName
	attrs.HardwareAddr = p.HostMAC
	attrs.MTU = p.MTU
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

// netkit returns a device with Ethernet headers, like a veth, and without netkit programs: our programs are attached as
// on a veth.
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

// Delete deletes a device, and with it the other end of a pair. It succeeds if the device does not exist.
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

// Find returns the device with that name, or nil if there is none.
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
		all = append(all, PrefixOf(*a.IPNet))
	}
	return all, nil
}

// Address is a container's address with its subnet's prefix length, and its gateway, an
// address of the host.
type Address struct {
	Prefix  netip.Prefix
	Gateway netip.Addr
}

// IsIPv6 reports whether the address is IPv6.
func (a Address) IsIPv6() bool { return a.Prefix.Addr().Is6() }

const loopback = 1 // ifindex of lo in every network namespace

// addrGenModeNone is IN6_ADDR_GEN_MODE_NONE of linux/if_link.h.
const addrGenModeNone = 1

// RaiseWith sets the host's end up with one address, which the host never uses as a source address.
func RaiseWith(host *netlink.Handle, p Pair, addr netip.Addr) error {
	own := &netlink.Addr{IPNet: ipNet(hostPrefix(addr)), Scope: int(netlink.SCOPE_HOST), Flags: unix.IFA_F_NOPREFIXROUTE}
	if err := host.AddrAdd(deviceOf(p.HostIndex), own); err != nil {
		return fmt.Errorf("add address %s to %s: %w", addr, p.HostName, err)
	}
	return raise(host, p)
}

func raise(host *netlink.Handle, p Pair) error {
	if err := ignoreRouters(p.HostName); err != nil {
		return err
	}
	if err := host.LinkSetUp(deviceOf(p.HostIndex)); err != nil {
		return fmt.Errorf("set %s up: %w", p.HostName, err)
	}
	return nil
}

// SetUpHost sets the host's end up, with the gateways as its addresses and a route to each container address. Then the
// kernel replies to ARP, neighbor solicitations and pings for a gateway. Everything disappears with the device.
func SetUpHost(host *netlink.Handle, p Pair, addresses []Address) error {
	device := deviceOf(p.HostIndex)
	own, err := hostAddresses(host, device, addresses)
	if err != nil {
		return fmt.Errorf("disable automatic link-local addresses on %s: %w", p.HostName, err)
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
			return fmt.Errorf("add a route to %s via %s: %w", address.Prefix.Addr(), p.HostName, err)
		}
	}
	return nil
}

// hostAddresses returns the addresses of the host's end: the gateways and, for IPv6, a link-local one, which a
// forwarding kernel needs as the source of neighbor solicitations. The link-local address is fixed, and so usable at
// once. hostAddresses disables the kernel's own, which would be unusable during duplicate address detection.
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

// SetUpContainer sets the container's end and its lo up, with the addresses and routes. As with the ptp plugin, an
// address has its subnet's prefix length, but only the gateway is on-link: everything else is routed through the
// gateway.
func SetUpContainer(ns netns.NsHandle, container *netlink.Handle, p Pair, addresses []Address, routes []*cnitypes.Route) error {
	found, err := Find(container, p.ContainerName)
	if err != nil {
		return err
	}
	if found == nil {
		return fmt.Errorf("%s is no longer in the container", p.ContainerName)
	}
	device := deviceOf(found.Attrs().Index)
	if err := p.BigTCP.set(container, device); err != nil {
		return fmt.Errorf("raise the GSO sizes of %s: %w", p.ContainerName, err)
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
	if err := addRoutes(container, all); err != nil {
		return err
	}
	return p.introduceGateways(container, device, addresses)
}

// introduceGateways tells the container the gateways' MAC address, as if it had just asked. It could ask in vain, and would
// then wait for a second: the kernel activates the host's end in a work queue, and until then drops what that sends.
func (p Pair) introduceGateways(container *netlink.Handle, device *netlink.GenericLink, addresses []Address) error {
	for _, address := range addresses {
		if !address.Gateway.IsValid() {
			continue
		}
		neighbor := &netlink.Neigh{LinkIndex: device.Index, IP: address.Gateway.AsSlice(), HardwareAddr: p.HostMAC, State: netlink.NUD_REACHABLE}
		if err := container.NeighSet(neighbor); err != nil {
			return fmt.Errorf("tell the container the MAC address of %s: %w", address.Gateway, err)
		}
	}
	return nil
}

// addRoutes adds routes to the container. If another interface of the container has the same route, it adds ours with a
// lower priority, unless the configuration sets one.
func addRoutes(container *netlink.Handle, routes []netlink.Route) error {
	const lowPriority = 2048 // twice IPv6's default metric

	type routeKey struct {
		dst             string
		table, priority int
	}
	ours := map[routeKey]bool{}
	for _, route := range routes {
		key := routeKey{route.Dst.String(), route.Table, route.Priority}
		err := container.RouteAdd(&route)
		if errors.Is(err, unix.EEXIST) && !ours[key] && route.Priority == 0 {
			route.Priority = lowPriority + route.LinkIndex
			err = container.RouteAdd(&route)
		}
		if err != nil {
			return fmt.Errorf("add route %v to the container: %w", route, err)
		}
		ours[key] = true
	}
	return nil
}

// addContainerAddress adds an address to the container's interface. It enables IPv6 there if necessary, because Docker
// and others create namespaces with IPv6 disabled.
func addContainerAddress(ns netns.NsHandle, container *netlink.Handle, device *netlink.GenericLink, name string, address Address) error {
	err := addAddress(container, device, address.Prefix)
	if address.IsIPv6() && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM)) {
		if err := writeSysctlIn(ns, "ipv6/conf/"+name+"/disable_ipv6", "0"); err != nil {
			return fmt.Errorf("enable IPv6 on %s: %w", name, err)
		}
		err = addAddress(container, device, address.Prefix)
	}
	if err != nil {
		return fmt.Errorf("add %s to %s in the container: %w", address.Prefix, name, err)
	}
	return nil
}

// ContainerRoutes returns all routes of the container: to each gateway, to the subnets through their gateways, and the
// configured ones in their order. A configured route without a gateway, or with one of its own, gets the gateway of the
// first address of its family. Addresses may share a gateway or a subnet, whose route is that of the first of them.
func ContainerRoutes(ifindex int, addresses []Address, routes []*cnitypes.Route) []netlink.Route {
	var toGateways, others []netlink.Route
	seen := map[netip.Prefix]bool{}
	for _, address := range addresses {
		if !address.Gateway.IsValid() {
			continue
		}
		gateway, subnet := hostPrefix(address.Gateway), address.Prefix.Masked()
		if !seen[gateway] {
			toGateways = append(toGateways, netlink.Route{LinkIndex: ifindex, Dst: ipNet(gateway), Scope: netlink.SCOPE_LINK})
		}
		if !subnet.IsSingleIP() && !seen[subnet] {
			others = append(others, netlink.Route{
				LinkIndex: ifindex,
				Dst:       ipNet(subnet),
				Gw:        address.Gateway.AsSlice(),
				Src:       address.Prefix.Addr().AsSlice(),
			})
		}
		seen[gateway], seen[subnet] = true, true
	}
	for _, route := range routes {
		others = append(others, containerRoute(ifindex, addresses, route))
	}
	return append(toGateways, others...)
}

// RoutesTo returns the routes with the destination, table and, unless it is 0, device of want.
func RoutesTo(handle *netlink.Handle, want netlink.Route) ([]netlink.Route, error) {
	mask := netlink.RT_FILTER_DST
	if want.LinkIndex != 0 {
		mask |= netlink.RT_FILTER_OIF
	}
	if want.Table != 0 {
		mask |= netlink.RT_FILTER_TABLE // otherwise the main table
	}
	found, err := rtnl.Routes(handle, nl.GetIPFamily(want.Dst.IP), &want, mask)
	if err != nil {
		return nil, fmt.Errorf("list the routes to %s: %w", want.Dst, err)
	}
	return found, nil
}

func containerRoute(ifindex int, addresses []Address, configured *cnitypes.Route) netlink.Route {
	route := netlink.Route{
		LinkIndex: ifindex,
		Dst:       &configured.Dst,
		Gw:        configured.GW,
		MTU:       configured.MTU,
		AdvMSS:    configured.AdvMSS,
		Priority:  configured.Priority,
	}
	if configured.Table != nil {
		route.Table = *configured.Table
	}
	if configured.Scope != nil {
		route.Scope = netlink.Scope(*configured.Scope)
	}
	if _, own := OwnGateway(configured, addresses); own || route.Gw.IsUnspecified() {
		route.Gw = nil
	}
	if route.Gw == nil && route.Scope != netlink.SCOPE_LINK {
		route.Gw = gatewayFor(configured, addresses)
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

// addAddress adds an address without a route to its subnet, and without duplicate address
// detection, because IPAM assigns each address once.
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

// ipNet keeps the host bits, which netlink needs for addresses.
func ipNet(prefix netip.Prefix) *net.IPNet {
	return &net.IPNet{
		IP:   prefix.Addr().AsSlice(),
		Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
	}
}
