package testenv

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// AddRoute adds a route to prefix via gateway.
func (ns *Namespace) AddRoute(prefix netip.Prefix, gateway netip.Addr) error {
	if err := ns.rtnl.RouteAdd(routeOf(prefix, gateway)); err != nil {
		return fmt.Errorf("add route to %s via %s in %s: %w", prefix, gateway, ns.Name, err)
	}
	return nil
}

func routeOf(prefix netip.Prefix, gateway netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst: &net.IPNet{
			IP:   prefix.Masked().Addr().AsSlice(),
			Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
		},
		Gw: gateway.AsSlice(),
	}
}

// Unspecified returns the unspecified address of addr's family.
func Unspecified(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}
