package link

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Uplink is an external interface of the host.
type Uplink struct {
	Index int
	// The host's source addresses for packets to the outside through this device. Either may be invalid.
	Addr4, Addr6 netip.Addr
}

// defaultRoutes returns the host's default route of each family that has one. It looks up addresses that are reserved
// for documentation (RFC 5737, RFC 9637), to which nothing is sent.
func defaultRoutes(host *netlink.Handle) (found []netlink.Route) {
	for _, outside := range []net.IP{net.ParseIP("203.0.113.1"), net.ParseIP("3fff::1")} {
		routes, _ := host.RouteGet(outside) // an error: none
		found = append(found, routes...)
	}
	return found
}

// Uplinks returns the host's uplinks in no particular order: the devices for which chosen returns true. If chosen is
// nil, these are the devices of default routes and connected subnets, and devices that could get such a route later.
func Uplinks(host *netlink.Handle, devices []netlink.Link, chosen func(netlink.Link) bool) ([]Uplink, error) {
	routed, err := routedUplinks(host)
	if err != nil {
		return nil, err
	}
	found := map[int]*Uplink{}
	if chosen == nil {
		found, chosen = routed, couldFaceOut
	}
	for _, device := range devices {
		index := device.Attrs().Index
		if index == loopback || found[index] != nil || !chosen(device) {
			continue
		}
		if found[index] = routed[index]; found[index] != nil {
			continue
		}
		if found[index], err = unroutedUplink(host, device); err != nil {
			return nil, err
		}
	}
	var uplinks []Uplink
	for _, uplink := range found {
		uplinks = append(uplinks, *uplink)
	}
	return uplinks, nil
}

// unroutedUplink returns a device without a route in the main table, with its first addresses.
func unroutedUplink(host *netlink.Handle, device netlink.Link) (*Uplink, error) {
	uplink := &Uplink{Index: device.Attrs().Index}
	own, err := Addresses(host, device)
	for _, prefix := range own {
		if !prefix.Addr().IsLinkLocalUnicast() {
			uplink.addAddress(prefix.Addr())
		}
	}
	return uplink, err
}

// couldFaceOut reports whether a device without a route may get a route to the outside later, when it comes up or gets
// an address. Devices of other engines' containers do not count: they appear often, and each program costs
// milliseconds. Ports do not count, because their bridge or bond does.
func couldFaceOut(device netlink.Link) bool {
	name := device.Attrs().Name
	if IsPort(device) || slices.Contains(fallbackTunnels, name) {
		return false
	}
	switch device.Type() {
	case "veth", "netkit", "dummy":
		// Engines give this name to the end inside a container: then this host is a container itself. The engine's
		// devices come up with their addresses.
		return strings.HasPrefix(name, "eth") && device.Attrs().Flags&net.FlagUp == 0
	case "ifb", "ipvtap", "macvtap", "vrf":
		return false
	default:
		return true
	}
}

// IsPort reports whether a device is the port of a bridge or bond. A device in a VRF has routes of its own.
func IsPort(device netlink.Link) bool {
	_, inVRF := device.Attrs().Slave.(*netlink.VrfSlave)
	return device.Attrs().MasterIndex != 0 && !inVRF
}

// fallbackTunnels are devices that the kernel adds to each network namespace when it loads the module of a tunnel.
var fallbackTunnels = []string{
	"erspan0", "gre0", "gretap0", "ip6_vti0", "ip6gre0", "ip6tnl0", "ip_vti0", "sit0", "tunl0",
}

// routedUplinks returns the devices of the host's default routes and connected subnets by index. The host's ends of our
// veths have no subnet. It reads only the routes that the kernel made for addresses, so the cost does not grow with the
// containers.
func routedUplinks(host *netlink.Handle) (map[int]*Uplink, error) {
	found := map[int]*Uplink{}
	for _, route := range defaultRoutes(host) {
		source, _ := netip.AddrFromSlice(route.Src)
		addUplink(found, route.LinkIndex, source.Unmap())
	}
	connected, err := rtnl.ConnectedRoutes()
	if err != nil {
		return nil, fmt.Errorf("list the host's subnets: %w", err)
	}
	for _, route := range connected {
		if route.Prefix.Addr().IsLinkLocalUnicast() || isOwnAddress(route.Prefix) {
			continue
		}
		if !route.Source.IsValid() {
			route.Source = sourceTowards(host, route)
		}
		addUplink(found, route.Device, route.Source)
	}
	return found, nil
}

// isOwnAddress reports whether a prefix is that of the kernel's route to an IPv6 address without a subnet, which another
// plugin may have added to its end of a veth. A point-to-point device may have one, too; it is found by its IPv4 address
// or a default route.
func isOwnAddress(prefix netip.Prefix) bool { return prefix.Addr().Is6() && prefix.IsSingleIP() }

// addUplink adds a device and, if it is valid, a source address. It keeps the first address of each family.
func addUplink(found map[int]*Uplink, device int, source netip.Addr) {
	if device <= loopback {
		return
	}
	if found[device] == nil {
		found[device] = &Uplink{Index: device}
	}
	found[device].addAddress(source)
}

// addAddress keeps the first address of its family.
func (u *Uplink) addAddress(addr netip.Addr) {
	switch {
	case addr.Is4() && !u.Addr4.IsValid():
		u.Addr4 = addr
	case addr.Is6() && !u.Addr6.IsValid():
		u.Addr6 = addr
	}
}

// sourceTowards returns the host's source address for a connected subnet. The kernel's own IPv6 routes do not contain it,
// so this looks up the route to one of the subnet's last addresses.
func sourceTowards(host *netlink.Handle, subnet rtnl.NodeRoute) (source netip.Addr) {
	ip := subnet.Prefix.Addr().AsSlice()
	for bit := subnet.Prefix.Bits(); bit < 8*len(ip)-1; bit++ {
		ip[bit/8] |= 0x80 >> (bit % 8)
	}
	routes, err := host.RouteGetWithOptions(ip, &netlink.RouteGetOptions{OifIndex: subnet.Device})
	if err == nil && len(routes) > 0 {
		source, _ = netip.AddrFromSlice(routes[0].Src)
	}
	return source.Unmap()
}

// Device returns the device with that index, or nil if there is none.
func Device(host *netlink.Handle, index int) (netlink.Link, error) {
	device, err := host.LinkByIndex(index)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	return device, err
}

// HeaderOf returns the link-layer header of a device's packets, and whether the datapath can parse it. On a tunnel
// device packets have no header.
func HeaderOf(device netlink.Link) (header loader.Header, known bool) {
	switch device.Attrs().EncapType {
	case "ether":
		return loader.Ethernet, true
	case "none", "rawip", "ipip", "tunnel6", "sit", "ppp":
		return loader.NoHeader, true
	default:
		return "", false
	}
}

// FacesOut says why a device leads to the outside although containers may be behind it, or returns "": it has the host's
// default route, or it is a bridge with a port to a network. Behind a tunnel there may be containers of other hosts.
func FacesOut(host *netlink.Handle, device netlink.Link) (why string, err error) {
	hasIndex := func(route netlink.Route) bool { return route.LinkIndex == device.Attrs().Index }
	if slices.ContainsFunc(defaultRoutes(host), hasIndex) {
		return "has the default route", nil
	}
	devices, err := List(host)
	for _, port := range devices {
		if port.Attrs().MasterIndex == device.Attrs().Index && slices.Contains([]string{"device", "bond", "team", "vlan", "macvlan"}, port.Type()) {
			return "has the port " + port.Attrs().Name, nil
		}
	}
	return "", err
}

// Route is how the host reaches an address.
type Route struct {
	Device int        // its index
	Source netip.Addr // the host's source address
	// Gateway is invalid where the address is on the device's link.
	Gateway netip.Addr
}

// RouteTo looks up the host's route to an address.
func RouteTo(host *netlink.Handle, addr netip.Addr) (Route, error) {
	routes, err := host.RouteGet(addr.AsSlice())
	if err != nil {
		return Route{}, fmt.Errorf("look up the host's route to %s: %w", addr, err)
	}
	if len(routes) == 0 {
		return Route{}, fmt.Errorf("the host has no route to %s", addr)
	}
	source, _ := netip.AddrFromSlice(routes[0].Src)
	gateway, _ := netip.AddrFromSlice(routes[0].Gw)
	return Route{Device: routes[0].LinkIndex, Source: source.Unmap(), Gateway: gateway.Unmap()}, nil
}

// OutsideMTU returns the MTU of the host's default routes, the smaller one of both families, or the MTU of Ethernet if
// there is no default route.
func OutsideMTU(host *netlink.Handle) (int, error) {
	const ethernet = 1500

	least, byDevice := 0, map[int]int{}
	for _, route := range defaultRoutes(host) {
		mtu := cmp.Or(route.MTU, byDevice[route.LinkIndex])
		if mtu == 0 {
			device, err := Device(host, route.LinkIndex)
			if err != nil {
				return 0, fmt.Errorf("look up the device of the default route: %w", err)
			}
			if device == nil {
				continue
			}
			mtu = device.Attrs().MTU
			byDevice[route.LinkIndex] = mtu
		}
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	if least == 0 {
		return ethernet, nil
	}
	return least, nil
}

// IsBridge reports whether a device is a bridge.
func IsBridge(device netlink.Link) bool { return device.Type() == "bridge" }

// BridgeNetfilter describes how br_netfilter affects an uplink, with the remedy, or returns "". It shows packets that a
// bridge receives to rules and conntrack at the bridge's port, before the datapath translates them. Rules see the
// packets again afterwards, so only rules in PREROUTING are affected. The calling thread's network namespace must be
// the host's.
func BridgeNetfilter(uplink netlink.Link) string {
	if !IsBridge(uplink) {
		return ""
	}
	var on []string
	for _, name := range []string{"bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables"} {
		if value, err := readSysctl(name); err == nil && value == "1" { // else br_netfilter is not loaded
			on = append(on, "net."+strings.ReplaceAll(name, "/", "."))
		}
	}
	if len(on) == 0 {
		return ""
	}
	return fmt.Sprintf("uplink %s is a bridge, and br_netfilter shows its packets to rules in PREROUTING before they are translated: "+
		"rules there that drop ct state invalid drop replies to containers: set %s to 0, or accept what comes by the bridge's ports before them",
		uplink.Attrs().Name, strings.Join(on, " and "))
}
