package plugin

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// Routes with a gateway of their own, which is another container, a neighbor of the host, or the
// host. The container has all its routes via the host, which looks up the gateway for each packet.
// So the gateway's container may come later, and come back.

// findGateways refuses routes with an invalid gateway, and prepares the others.
func (a *adder) findGateways(context.Context) error {
	a.routes = slices.Clone(a.reserved.Routes)
	for i, route := range a.routes {
		gateway, own := link.OwnGateway(route, a.addresses)
		if !own {
			continue
		}
		key := fmt.Sprintf("ipam.routes[%d]", i)
		if expected := gatewayFault(route, gateway, a.addresses); expected != "" {
			return cnierr.Invalid(key, route, expected)
		}
		place := link.PlaceOf(a.host, gateway)
		here, err := a.isHere(gateway, place)
		if err != nil {
			return err
		}
		if !here {
			return cnierr.Invalid(key, route, `a "gw" that is an address of this network, of the host, or of a neighbor on an uplink`)
		}
		if a.routes[i], err = a.fitMTU(route, place.Neighbor); err != nil {
			return err
		}
	}
	a.gatewayRoutes = gatewayRoutes(a.addresses, a.routes, isOn(a.host))
	return nil
}

// gatewayFault says what is expected instead of an invalid gateway; "" if it is valid.
func gatewayFault(route *cnitypes.Route, gateway netip.Addr, addresses []link.Address) string {
	sameFamily := func(a link.Address) bool { return a.IsIPv6() == gateway.Is6() }
	switch {
	case gateway.Is4() != (route.Dst.IP.To4() != nil):
		return `a "gw" of the family of "dst"`
	case !slices.ContainsFunc(addresses, sameFamily):
		return "a family of which the container has an address"
	case gateway.Is6() && gateway.IsLinkLocalUnicast():
		return `a "gw" with a global address: a link-local one does not say on which of the host's links it is`
	case gateway.IsLoopback() || gateway.IsMulticast() || gateway == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return `a "gw" that is the address of a container or host`
	case slices.ContainsFunc(addresses, func(a link.Address) bool { return a.Prefix.Addr() == gateway }):
		return `a "gw" that is not the container itself`
	case !link.IsMain(route):
		return `no "table", or the main one, 254: the host does not know which table of the container a packet has used`
	case route.Scope != nil && *route.Scope != 0:
		return `no "scope", or the global one, 0, for a route with a "gw"`
	default:
		return ""
	}
}

// isHere reports whether the datapath can reach a gateway, or can as soon as its container exists.
func (a *adder) isHere(gateway netip.Addr, place link.Place) (bool, error) {
	if place.Local || a.inNetwork(gateway) {
		return true, nil
	}
	if place.Neighbor == 0 {
		return false, nil
	}
	if _, found, err := maps.GetEndpoint(a.datapath, gateway); found || err != nil {
		return found, err
	}
	return a.isUplink(place.Neighbor)
}

// inNetwork reports whether a container of the network can have the address.
func (a *adder) inNetwork(addr netip.Addr) bool {
	var subnets []netip.Prefix
	for _, address := range a.addresses {
		subnets = append(subnets, address.Prefix.Masked())
	}
	if a.config.IPAM != nil {
		subnets = append(subnets, a.config.IPAM.Subnets()...)
	}
	return slices.ContainsFunc(subnets, func(subnet netip.Prefix) bool {
		isBroadcast := addr.Is4() && !subnet.Contains(addr.Next())
		return subnet.Contains(addr) && addr != subnet.Addr() && !isBroadcast
	})
}

// isUplink reports whether a device is an uplink, or becomes one at the end of this ADD.
func (a *adder) isUplink(device int) (bool, error) {
	known, isKnown, err := maps.GetUplink(a.datapath, device)
	if err != nil || isKnown {
		return !known.ContainerBridge, err
	}
	devices, err := link.List(a.host)
	if err != nil {
		return false, err
	}
	found, err := link.Uplinks(a.host, devices, refresh.Matcher(a.config.Uplinks))
	return slices.ContainsFunc(found, func(u link.Uplink) bool { return u.Index == device }), err
}

// fitMTU gives a route the MTU of the device to its gateway, if that is smaller than the container's.
// The packets bypass the stack, which would otherwise send an ICMP error.
func (a *adder) fitMTU(route *cnitypes.Route, device int) (*cnitypes.Route, error) {
	if device == 0 {
		return route, nil
	}
	found, err := link.Device(a.host, device)
	if err != nil || found == nil {
		return route, err
	}
	mtu := found.Attrs().MTU
	if mtu >= cmp.Or(route.MTU, a.pair.MTU) {
		return route, nil
	}
	fitting := *route
	fitting.MTU = mtu
	return &fitting, nil
}

func isOn(host *netlink.Handle) func(netip.Addr) bool {
	return func(addr netip.Addr) bool { return link.PlaceOf(host, addr).Local }
}

// gatewayRoutes returns the routes that the datapath needs: those in the main table with a gateway
// other than the host, and the more specific ones that go to the host.
func gatewayRoutes(addresses []link.Address, routes []*cnitypes.Route, isHost func(netip.Addr) bool) []maps.Route {
	all := link.ContainerRoutes(0, addresses, routes)
	configured := all[len(all)-len(routes):]
	table := map[netip.Prefix]preferred{}
	for _, route := range all[:len(all)-len(routes)] {
		table[link.PrefixOf(*route.Dst)] = preferred{}
	}
	for i, route := range routes {
		to, metric := link.PrefixOf(route.Dst).Masked(), metricOf(configured[i])
		if before, found := table[to]; !link.IsMain(route) || found && before.metric <= metric {
			continue
		}
		gateway, own := link.OwnGateway(route, addresses)
		if !own || isHost(gateway) {
			gateway = netip.Addr{}
		}
		table[to] = preferred{gateway, metric}
	}
	return withGateways(table)
}

// preferred returns the gateway of the route that the kernel prefers for a destination; the zero Addr
// is the host.
type preferred struct {
	gateway netip.Addr
	metric  int
}

func metricOf(route netlink.Route) int {
	const defaultOfIPv6 = 1024

	if route.Priority == 0 && route.Dst.IP.To4() == nil {
		return defaultOfIPv6
	}
	return route.Priority
}

// withGateways returns the routes with a gateway and those within them, in order.
func withGateways(table map[netip.Prefix]preferred) (routes []maps.Route) {
	for to, route := range table {
		matters := route.gateway.IsValid()
		for outer, around := range table {
			matters = matters || around.gateway.IsValid() && outer.Bits() < to.Bits() && outer.Contains(to.Addr())
		}
		if matters {
			routes = append(routes, maps.Route{To: to, Gateway: route.gateway})
		}
	}
	slices.SortFunc(routes, func(a, b maps.Route) int { return cmp.Compare(a.String(), b.String()) })
	return routes
}
