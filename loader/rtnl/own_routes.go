package rtnl

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// UnassignedPrefixes returns the prefixes for which the agent or the plugin has an unreachable route in the calling
// thread's network namespace: an address in one of them is unreachable, unless a container has it.
func UnassignedPrefixes() (prefixes []netip.Prefix, err error) {
	for _, protocol := range []uint8{NodeProtocol, PluginProtocol} {
		routes, err := routesOf(protocol)
		if err != nil {
			return nil, err
		}
		for _, route := range routes {
			if route.Unreachable {
				prefixes = append(prefixes, route.Prefix)
			}
		}
	}
	return prefixes, nil
}

// IsUnassigned reports whether such a route refuses packets to an address. The handle must be of the calling thread's
// network namespace.
func IsUnassigned(handle *netlink.Handle, addr netip.Addr) (bool, error) {
	if !addr.IsValid() {
		return false, nil
	}
	if _, err := handle.RouteGet(addr.AsSlice()); !errors.Is(err, unix.EHOSTUNREACH) {
		return false, nil
	}
	prefixes, err := UnassignedPrefixes()
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }), err
}

// RoutedByNodes returns the prefixes of the node agent's routes to other nodes in the calling thread's network namespace.
func RoutedByNodes() (routed map[netip.Prefix]bool, err error) {
	routes, err := routesOf(NodeProtocol)
	routed = map[netip.Prefix]bool{}
	for _, route := range routes {
		if !route.Unreachable {
			routed[route.Prefix] = true
		}
	}
	return routed, err
}

// ConnectedRoutes returns the routes of the main table that the kernel itself made for addresses with a subnet, in the
// calling thread's network namespace. Their Source may be invalid.
func ConnectedRoutes() ([]NodeRoute, error) {
	routes, err := routesOf(unix.RTPROT_KERNEL)
	return slices.DeleteFunc(routes, func(r NodeRoute) bool { return r.Unreachable || r.Prefix.Bits() == 0 }), err
}

// DeletePluginRoutes deletes routes of the plugin in the calling thread's network namespace.
func DeletePluginRoutes(which func(NodeRoute) bool) error {
	routes, err := OpenNodeRoutes(PluginProtocol)
	if err != nil {
		return err
	}
	defer routes.Close()
	list, err := routes.List()
	for _, route := range list {
		if which(route) {
			err = errors.Join(err, routes.Delete(route))
		}
	}
	return err
}

func routesOf(protocol uint8) ([]NodeRoute, error) {
	routes, err := OpenNodeRoutes(protocol)
	if err != nil {
		return nil, err
	}
	defer routes.Close()
	return routes.List()
}
