package reconcile

import (
	"context"
	"errors"
	"path"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// Matcher returns a predicate for the devices that uplink name patterns select, or nil without
// patterns: then the host's routes decide. No pattern selects the host's end of a container.
func Matcher(patterns []string) func(netlink.Link) bool {
	if patterns == nil {
		return nil
	}
	return func(device netlink.Link) bool {
		_, ours := names.ParseAlias(device.Attrs().Alias)
		return !ours && slices.ContainsFunc(patterns, func(pattern string) bool {
			matches, _ := path.Match(pattern, device.Attrs().Name)
			return matches
		})
	}
}

// Uplinks brings the datapath's uplinks in line with the host's. It attaches the programs of new
// ones, writes addresses that changed and removes what belongs to devices that are gone. Without a
// change it only reads. patterns are the network's uplinks key; an uplink that they do not select
// stays one for other networks.
func Uplinks(ctx context.Context, host *netlink.Handle, datapath *loader.Datapath, patterns []string) error {
	found, err := link.Uplinks(host, Matcher(patterns))
	if err != nil {
		return err
	}
	written, err := maps.Uplinks(datapath)
	if err != nil {
		return err
	}
	known := map[int]maps.Uplink{}
	for _, uplink := range written {
		known[uplink.IfIndex] = uplink
	}

	var changed []maps.Uplink
	for _, uplink := range found {
		if known[uplink.Index].ContainerBridge {
			delete(known, uplink.Index)
			continue
		}
		wanted := maps.Uplink{
			IfIndex: uplink.Index, Addr4: uplink.Addr4, Addr6: uplink.Addr6,
			Bridge: known[uplink.Index].Bridge, // addUplinks finds out once
		}
		attached, err := datapath.UplinkAttached(uplink.Index)
		if err != nil {
			return err
		}
		if !attached || known[uplink.Index] != wanted {
			changed = append(changed, wanted)
		}
		delete(known, uplink.Index)
	}
	gone, err := goneDevices(host, known)
	if err != nil || len(changed)+len(gone) == 0 {
		return err
	}
	return maps.With(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(addUplinks(host, datapath, store, changed), removeUplinks(datapath, store, gone))
	})
}

// ExcludeBridge marks a bridge of containers, which is never an uplink whatever it was taken for
// before. The caller holds the datapath's lock.
func ExcludeBridge(datapath *loader.Datapath, store *maps.Store, ifindex int) error {
	return errors.Join(
		datapath.DetachUplink(ifindex),
		store.SetUplink(maps.Uplink{IfIndex: ifindex, ContainerBridge: true}),
	)
}

func addUplinks(host *netlink.Handle, datapath *loader.Datapath, store *maps.Store, uplinks []maps.Uplink) error {
	for _, uplink := range uplinks {
		device, err := link.Device(host, uplink.IfIndex)
		if err != nil {
			return err
		}
		if device == nil {
			continue
		}
		header, ok := link.HeaderOf(device)
		if !ok {
			continue
		}
		uplink.Bridge = link.IsBridge(device)
		if err := store.SetUplink(uplink); err != nil {
			return err
		}
		if err := datapath.AttachUplink(uplink.IfIndex, header); err != nil {
			return err
		}
	}
	return nil
}

func removeUplinks(datapath *loader.Datapath, store *maps.Store, gone []int) error {
	var errs []error
	for _, index := range gone {
		errs = append(errs, datapath.DetachUplink(index), store.DeleteUplink(index))
	}
	return errors.Join(errs...)
}

// goneDevices returns the uplinks whose device no longer exists. A device that merely lost its
// routes keeps its programs, for the connections that still use it.
func goneDevices(host *netlink.Handle, uplinks map[int]maps.Uplink) ([]int, error) {
	var gone []int
	for index := range uplinks {
		device, err := link.Device(host, index)
		if err != nil {
			return nil, err
		}
		if device == nil {
			gone = append(gone, index)
		}
	}
	return gone, nil
}
