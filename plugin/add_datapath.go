package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// These steps of ADD write map entries and attach programs.

func (a *adder) attach(ctx context.Context) error {
	for _, device := range a.routeTo {
		if device == a.pair.HostIndex {
			continue
		}
		if err := a.checkBridge(device); err != nil {
			return err
		}
	}
	network := maps.NetworkToken(a.config.Attachment.Network)
	for _, address := range a.addresses {
		a.endpoints = append(a.endpoints, maps.Endpoint{
			Addr:      address.Prefix.Addr(),
			Owner:     a.owner,
			Network:   network,
			Container: a.containerToken(),
			IfIndex:   a.deviceTo(address.Prefix.Addr()),
			MAC:       a.pair.ContainerMAC,
			HostMAC:   a.pair.HostMAC,
			Gateway:   address.Gateway,
			Masq:      a.config.Masq.For(address.Prefix.Addr()),
			Tunnels:   a.config.Masq.TunnelsFor(address.Prefix.Addr()),
			FastPath:  a.config.FastPathFor(a.isChained()),
			MTU:       a.pair.MTU,
			NonMasq:   maps.PrefixSetOf(a.config.Masq.NonMasqFor(address.Prefix.Addr())),
			Routes:    maps.RouteSetOf(a.gatewayRoutes),
		})
	}
	err := maps.With(ctx, a.datapath, func(store *maps.Store) error {
		a.written = true
		device := a.device(network)
		var err error
		if device.Policy, err = a.addPolicy(store); err != nil {
			return err
		}
		if err := store.PutDevice(device); err != nil {
			return err
		}
		for _, endpoint := range a.endpoints {
			if err := a.addEndpoint(store, endpoint); err != nil {
				return err
			}
		}
		if err := store.AddRoutes(a.gatewayRoutes); err != nil {
			return err
		}
		if len(a.config.HostPortsFor(a.endpoints)) > 0 {
			store.KeepGeneration() // openHostPorts makes a new one
		}
		return nil
	})
	if err != nil {
		return err
	}
	if a.isChained() {
		return a.datapath.AttachLiveEndpoint(a.pair.HostIndex)
	}
	return a.datapath.AttachEndpoint(a.pair.HostIndex)
}

func (a *adder) addEndpoint(store *maps.Store, endpoint maps.Endpoint) error {
	if err := a.create(store, func() error { return store.AddEndpoint(endpoint) }); err != nil {
		return err
	}
	if err := store.AddPrefixes(a.config.Masq.NonMasqFor(endpoint.Addr)); err != nil {
		return err
	}
	if endpoint.IfIndex == a.pair.HostIndex {
		return nil
	}
	return refresh.ExcludeBridge(a.datapath, store, endpoint.IfIndex)
}

func (a *adder) device(network maps.Network) maps.Device {
	device := maps.Device{
		IfIndex:    a.pair.HostIndex,
		Owner:      a.owner,
		Network:    network,
		Container:  a.containerToken(),
		MAC:        a.pair.ContainerMAC,
		AntiSpoof:  a.config.AntiSpoof,
		Shaped:     a.config.Bandwidth.Ingress.Rate != 0,
		Bridged:    a.pair.Bridge != 0,
		AnyAddress: len(a.addresses) == 0,
		IsPod:      a.isPod() && a.config.Pod.UID != "",
		Routes:     maps.RouteSetOf(a.gatewayRoutes),
	}
	for _, address := range a.addresses {
		addr, gateway := &device.Addr4, &device.Gateway4
		if address.IsIPv6() {
			addr, gateway = &device.Addr6, &device.Gateway6
		}
		if !addr.IsValid() {
			*addr, *gateway = address.Prefix.Addr(), address.Gateway
		}
	}
	return device
}

// containerToken returns the token that all attachments of a container have. A pod's is that of its UID, by which the node agent
// knows it.
func (a *adder) containerToken() maps.Container {
	if uid := a.config.Pod.UID; uid != "" {
		return maps.Container(maps.PodToken(uid))
	}
	return maps.ContainerToken(a.config.Attachment.ContainerID)
}

// deviceTo returns the host's device that leads to an address: the host's end of the veth, or a
// bridge to which another plugin has added it.
func (a *adder) deviceTo(addr netip.Addr) int {
	if device, ok := a.routeTo[addr]; ok {
		return device
	}
	return a.pair.HostIndex
}

func (a *adder) attachUplinks(ctx context.Context) error {
	found, err := refresh.Uplinks(ctx, a.host, a.datapath, a.config.Uplinks, a.pair.HostIndex)
	a.uplinks = found.Uplinks
	for _, name := range found.Missing {
		a.log.Info("no device of the host matches yet", "uplink", name)
	}
	if err == nil && a.config.Uplinks != nil && len(found.Uplinks) == 0 {
		a.log.Warn("no device of the host matches uplinks: nothing is masqueraded", "uplinks", a.config.Uplinks)
	}
	return err
}

func (a *adder) openHostPorts(ctx context.Context) error {
	entries := a.config.HostPortsFor(a.endpoints)
	if len(entries) == 0 {
		return nil
	}
	if err := checkListeners(entries, a.config.Attachment.ContainerID); err != nil {
		return err
	}
	return maps.With(ctx, a.datapath, func(store *maps.Store) error {
		for _, entry := range entries {
			if err := a.create(store, func() error { return store.AddHostPort(entry) }); err != nil {
				return err
			}
		}
		for _, port := range a.config.HostPorts {
			if err := store.AddPrefixes(port.SrcRanges); err != nil {
				return err
			}
		}
		return a.datapath.AttachLoopback()
	})
}

// create adds an entry. If another attachment has it, the error names that attachment if its device
// exists. Otherwise create removes that attachment and tries again: a port on any address may have several
// holders. That also removes unused programs and prefixes, so those of a new entry are added afterwards.
func (a *adder) create(store *maps.Store, add func() error) error {
	released := map[loader.Owner]bool{}
	for {
		err := add()
		taken, ok := errors.AsType[*maps.TakenError](err)
		if !ok || released[taken.Holder] {
			return err
		}
		living, findErr := a.findLiving(taken.Holder)
		if findErr != nil {
			return errors.Join(err, findErr)
		}
		if living != "" {
			return fmt.Errorf("%w (%s)", err, living)
		}
		a.log.Warn("remove the entries of a container that is gone", "owner", taken.Holder.String())
		if err := store.Release(taken.Holder); err != nil {
			return err
		}
		released[taken.Holder] = true
	}
}

// findLiving returns the name of an owner's attachment, or "" if its device is gone. The datapath has the
// device of a chained attachment; the record may be in another network's dataDir.
func (a *adder) findLiving(owner loader.Owner) (string, error) {
	device, err := link.Find(a.host, names.HostDevice(owner))
	if err == nil && device == nil {
		device, err = findOtherDevice(a.host, a.datapath, owner)
	}
	if err != nil || device == nil {
		return "", err
	}
	if records, err := record.Open(a.config.DataDir); err == nil {
		if rec, err := records.Read(owner); err == nil && rec != nil {
			return names.Of(rec.Attachment), nil
		}
	}
	return cmp.Or(device.Attrs().Alias, device.Attrs().Name), nil
}

// findOtherDevice returns the device of another plugin that an owner's entries are for, or nil.
func findOtherDevice(host *netlink.Handle, datapath *loader.Datapath, owner loader.Owner) (netlink.Link, error) {
	indexes, err := maps.DevicesOf(datapath, owner)
	for _, index := range indexes {
		device, err := link.Device(host, index)
		if err != nil {
			return nil, err
		}
		if device == nil {
			continue
		}
		if _, isOurs := names.ParseAlias(device.Attrs().Alias); !isOurs {
			return device, nil
		}
	}
	return nil, err
}
