// Package reconcile brings the datapath in line with changes of the host: uplinks that come, go or
// change their addresses or packet sizes, policy rules, programs that another tool has detached, and forwarding that
// somebody has turned off. ADD and STATUS do it as they go, and ebpfnetctl repair does it for all networks. The node
// agent of a cluster adds and removes its tunnel here.
//
// It may import loader, loader/rtnl, maps, plugin/link and plugin/names.
package reconcile

import (
	"context"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Wishes is what a network's configuration says of the host's uplinks.
type Wishes struct {
	Patterns []string // documented at Uplinks
	Raise    bool     // the uplinks' packet sizes
}

// Host restores what all containers of the host share: forwarding, the uplinks that the patterns
// select, the sizes of packets, what is known of policy rules, and the program of the loopback device.
// Runtimes call STATUS all the time, so no daemon has to watch. Without containers it changes
// nothing. It describes the sizes that it has changed.
func Host(ctx context.Context, datapath *loader.Datapath, wishes Wishes) (resized []string, err error) {
	endpoints, err := maps.Endpoints(datapath)
	if err != nil {
		return nil, err
	}
	uplinks, err := maps.Uplinks(datapath)
	if err != nil || len(uplinks)+len(endpoints) == 0 {
		return nil, err
	}
	if err := link.EnableForwarding(familiesOf(endpoints)); err != nil {
		return nil, err
	}
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()

	found, err := Uplinks(ctx, host, datapath, wishes.Patterns, allDevices)
	if err != nil {
		return nil, err
	}
	if err := Rules(ctx, datapath); err != nil {
		return nil, err
	}
	if err := loopback(ctx, datapath); err != nil {
		return nil, err
	}
	return sizes(host, found, wishes.Raise)
}

func familiesOf(endpoints []maps.Endpoint) (ipv4, ipv6 bool) {
	var addresses []link.Address
	for _, endpoint := range endpoints {
		addresses = append(addresses, link.Address{Prefix: netip.PrefixFrom(endpoint.Addr, endpoint.Addr.BitLen())})
	}
	return link.Families(addresses)
}

// loopback attaches the program of the loopback device where host ports need it.
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
