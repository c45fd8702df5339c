package plugin

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Addresses that no container has. Without a route of their own, packets to them would leave by the default route. So
// each network has unreachable routes for its ranges. They stay after the last DEL: others may still send to containers
// that are gone. GC of a network without attachments removes them, and so does unloading the datapath.

// refusesUnassigned reports whether this ADD adds the routes: the network's ranges are ours, and no node agent does it.
func (a *adder) refusesUnassigned() bool {
	return a.ownsInterface() && a.config.IPAM != nil && a.config.Cluster == ""
}

func (a *adder) refuseUnassigned(context.Context) error {
	routes, err := rtnl.OpenNodeRoutes(rtnl.PluginProtocol)
	if err != nil {
		return err
	}
	defer routes.Close()
	for _, r := range slices.Concat(a.config.IPAM.Ranges...) {
		prefixes, err := UnassignedPrefixes(r)
		if err != nil {
			return err
		}
		for _, prefix := range prefixes {
			route := rtnl.NodeRoute{Prefix: prefix, Metric: unassignedMetric(a.config.Attachment.Network), Unreachable: true}
			if err := routes.Add(route); err != nil && !errors.Is(err, unix.EEXIST) {
				return err
			}
		}
	}
	return nil
}

// UnassignedPrefixes returns the prefixes that ADD refuses of a range. A range that is smaller than its subnet has none
// while the host has the subnet on a link, such as another plugin's bridge: they would take precedence over the route to
// that link.
func UnassignedPrefixes(r ipam.Range) ([]netip.Prefix, error) {
	prefixes := r.Prefixes()
	if slices.Contains(prefixes, r.Subnet) {
		return prefixes, nil
	}
	connected, err := rtnl.ConnectedRoutes()
	for _, route := range connected {
		if !route.Prefix.IsSingleIP() && route.Prefix.Overlaps(r.Subnet) {
			return nil, err
		}
	}
	return prefixes, err
}

// unassignedMetric returns the metric of a network's routes. Each network has its own, because networks may share a
// subnet. It is so high that any other route to the same prefix takes precedence.
func unassignedMetric(network string) uint32 {
	const highest = 0xff << 24

	return highest | uint32(maps.NetworkToken(network))>>8
}

// AcceptUnassigned removes the routes of a network.
func AcceptUnassigned(network string) error {
	metric := unassignedMetric(network)
	return rtnl.DeletePluginRoutes(func(route rtnl.NodeRoute) bool { return route.Metric == metric })
}
