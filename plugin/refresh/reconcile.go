// Package refresh updates the datapath after changes of the host: uplinks that come, go or change their addresses,
// policy rules, programs that another tool has detached, and forwarding that somebody has turned off. STATUS does it
// for its network, ebpfnetctl repair for all networks, and ADD only for uplinks. The node agent of a cluster adds
// its tunnel here.
package refresh

import (
	"context"
	"fmt"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Host restores what all containers of the host share: forwarding, the uplinks that the patterns select, the datapath's
// information about policy rules, and the program of the loopback device. Runtimes call STATUS often, so no daemon is
// necessary. Without containers it changes nothing.
func Host(ctx context.Context, datapath *loader.Datapath, patterns []string) error {
	endpoints, err := maps.Endpoints(datapath)
	if err != nil {
		return err
	}
	uplinks, err := maps.Uplinks(datapath)
	if err != nil || len(uplinks)+len(endpoints) == 0 {
		return err
	}
	if err := link.EnableForwarding(familiesOf(endpoints)); err != nil {
		return err
	}
	host, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer host.Close()

	if _, err := Uplinks(ctx, host, datapath, patterns, allDevices); err != nil {
		return err
	}
	if err := Rules(ctx, datapath); err != nil {
		return err
	}
	return loopback(ctx, datapath)
}

func familiesOf(endpoints []maps.Endpoint) (ipv4, ipv6 bool) {
	for _, endpoint := range endpoints {
		ipv4, ipv6 = ipv4 || endpoint.Addr.Is4(), ipv6 || endpoint.Addr.Is6()
	}
	return ipv4, ipv6
}

// loopback attaches the program of the loopback device if there are host ports.
func loopback(ctx context.Context, datapath *loader.Datapath) error {
	attached, err := datapath.LoopbackAttached()
	if err != nil || attached {
		return err
	}
	ports, err := maps.HostPorts(datapath)
	if err != nil || len(ports) == 0 {
		return err
	}
	return maps.With(ctx, datapath, func(*maps.Store) error { return datapath.AttachLoopback() })
}

// Rules writes to the datapath whether the host has policy rules that fastPath always and auto must leave to the stack. Without
// a change it only reads.
func Rules(ctx context.Context, datapath *loader.Datapath) error {
	var found maps.RouteRules
	var err error
	if found.IPv4, found.IPv6, err = rtnl.UnfollowedRules(); err != nil {
		return fmt.Errorf("list policy rules: %w", err)
	}
	known, err := maps.ReadRouteRules(datapath)
	if err != nil || known == found {
		return err
	}
	return maps.With(ctx, datapath, func(store *maps.Store) error { return store.PutRouteRules(found) })
}
