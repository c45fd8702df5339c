package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// reserve allocates the addresses. A reservation of this attachment without a device belongs to a
// container that is gone or to an ADD that was killed: the new one gets the same addresses.
func (a *adder) reserve(ctx context.Context) error {
	if a.delegate != nil {
		return a.reserveByDelegate(ctx)
	}
	if a.config.IPAM == nil { // an interface without addresses
		a.reserved = &ipam.Result{}
		return nil
	}
	pool := a.poolWithout(a.inUse)
	reserved, err := pool.Reserve(ctx, a.reservation())
	if errors.Is(err, ipam.ErrDuplicate) {
		if err := a.disconnectDead(ctx); err != nil {
			return err
		}
		reserved, err = pool.Replace(ctx, a.reservation())
	}
	if err != nil {
		return fmt.Errorf("reserve addresses: %w", err)
	}
	a.undo.push(func(ctx context.Context) error { return pool.Release(ctx, a.reservation()) })
	a.useReserved(reserved)
	return nil
}

// reserveByDelegate executes the plugin's DEL on undo, even if its ADD fails (SPEC, section 4).
func (a *adder) reserveByDelegate(ctx context.Context) error {
	a.undo.push(a.delegate.release)
	reserved, err := a.delegate.reserve(ctx)
	if err != nil {
		return err
	}
	a.useReserved(reserved)
	return nil
}

func (a *adder) useReserved(reserved *ipam.Result) {
	a.reserved = reserved
	for _, address := range reserved.Addresses {
		a.addresses = append(a.addresses, link.Address(address))
	}
	if a.config.DefaultRoutes {
		reserved.Routes = withDefaultRoutes(reserved.Routes, a.addresses)
	}
	if a.container.IsOwn { // the gateways are the namespace's own addresses
		reserved.Routes = nil
	}
}

// withDefaultRoutes adds a default route for each family of the addresses that has none.
func withDefaultRoutes(routes []*cnitypes.Route, addresses []link.Address) []*cnitypes.Route {
	for _, address := range addresses {
		zero := netip.IPv6Unspecified()
		if address.Prefix.Addr().Is4() {
			zero = netip.IPv4Unspecified()
		}
		all := netip.PrefixFrom(zero, 0)
		isDefault := func(r *cnitypes.Route) bool { return link.PrefixOf(r.Dst) == all }
		if !slices.ContainsFunc(routes, isDefault) {
			routes = append(routes, &cnitypes.Route{Dst: net.IPNet{IP: zero.AsSlice(), Mask: net.CIDRMask(0, zero.BitLen())}})
		}
	}
	return routes
}

// checkDead refuses to replace an attachment that is alive.
func (a *adder) checkDead() error {
	device, err := link.Find(a.host, names.HostDevice(a.owner))
	if err != nil {
		return err
	}
	if device != nil {
		return a.exists()
	}
	return nil
}

// disconnectDead removes what this attachment left, except its addresses, unless it is alive.
func (a *adder) disconnectDead(ctx context.Context) error {
	if err := a.checkDead(); err != nil {
		return err
	}
	_, err := a.disconnect(ctx, a.netns)
	return err
}

// removeDead removes everything that this attachment left, unless it is alive. It is for addresses that
// another plugin allocates: then no reservation of ours shows that the container is gone.
func (a *adder) removeDead(ctx context.Context) error {
	if err := a.checkDead(); err != nil {
		return err
	}
	return loader.IfLoaded(loader.OpenLoaded, func(datapath *loader.Datapath) error {
		endpoints, err := maps.Endpoints(datapath)
		if err != nil || !slices.ContainsFunc(endpoints, func(e maps.Endpoint) bool { return e.Owner == a.owner }) {
			return err
		}
		return a.release(ctx, a.netns)
	})
}
