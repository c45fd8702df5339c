package link

import (
	"net"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// OwnGateway returns the gateway of a route, and whether it differs from the gateways of the addresses of its family.
// The container sends packets for it to the host, as any other packet; the datapath has the gateway.
func OwnGateway(route *cnitypes.Route, addresses []Address) (gateway netip.Addr, own bool) {
	gateway, ok := netip.AddrFromSlice(route.GW)
	gateway = gateway.Unmap()
	if !ok || gateway.IsUnspecified() || gateway == hostLinkLocal || len(addresses) == 0 {
		return gateway, false
	}
	ofAddress := slices.ContainsFunc(addresses, func(a Address) bool { return a.Gateway == gateway })
	return gateway, !ofAddress || gateway.Is4() != (route.Dst.IP.To4() != nil)
}

// IsMain reports whether a route is in the main table, which a packet uses unless a rule selects another one.
func IsMain(route *cnitypes.Route) bool {
	return route.Table == nil || *route.Table == unix.RT_TABLE_UNSPEC || *route.Table == unix.RT_TABLE_MAIN
}

// Place is where the host has an address.
type Place struct {
	Local    bool // on the host itself
	Neighbor int  // the device on which it is a neighbor; 0: none
}

// PlaceOf looks up where the host has an address. Without a route, the result is nowhere.
func PlaceOf(host *netlink.Handle, addr netip.Addr) Place {
	routes, err := host.RouteGet(addr.AsSlice())
	switch {
	case err != nil || len(routes) == 0:
		return Place{}
	case routes[0].Type == unix.RTN_LOCAL:
		return Place{Local: true}
	case routes[0].Type != unix.RTN_UNICAST || routes[0].Gw != nil:
		return Place{}
	default:
		return Place{Neighbor: routes[0].LinkIndex}
	}
}

// PrefixOf converts an address with a mask, as in CNI results and in netlink's. The prefix is invalid if n has no address. An
// IPv4-mapped IPv6 address becomes IPv4.
func PrefixOf(n net.IPNet) netip.Prefix {
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits)
}

// Families reports which families the addresses have.
func Families(addresses []Address) (ipv4, ipv6 bool) {
	for _, address := range addresses {
		if address.IsIPv6() {
			ipv6 = true
		} else {
			ipv4 = true
		}
	}
	return ipv4, ipv6
}

// DefaultGateway returns the gateway of an address without one: a link-local address that only the container's own link
// uses.
func DefaultGateway(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1}) // RFC 3927
	}
	return hostLinkLocal
}
