package plugin

import (
	"context"
	"errors"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// refreshUplinks makes the datapath's uplinks those of the host: new ones get
// programs, addresses are written where they changed, and what belongs to
// devices that are gone is removed. Without a change it only reads.
func refreshUplinks(ctx context.Context, host *netlink.Handle, datapath *loader.Datapath) error {
	found, err := link.Uplinks(host)
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
		if known[uplink.Index].Containers {
			delete(known, uplink.Index)
			continue
		}
		wanted := maps.Uplink{IfIndex: uplink.Index, Addr4: uplink.Addr4, Addr6: uplink.Addr6}
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

func addUplinks(host *netlink.Handle, datapath *loader.Datapath, store *maps.Store, uplinks []maps.Uplink) error {
	for _, uplink := range uplinks {
		device, err := link.Device(host, uplink.IfIndex)
		if err != nil {
			return err
		}
		if device == nil {
			continue
		}
		header, known := link.HeaderOf(device)
		if !known {
			continue
		}
		if err := store.SetUplink(uplink); err != nil {
			return err
		}
		if err := datapath.AttachUplink(uplink.IfIndex, header); err != nil {
			return err
		}
	}
	return nil
}

// keepFromUplinks makes a bridge that containers are behind no uplink, whatever it
// was taken for before. The caller holds the lock.
func keepFromUplinks(datapath *loader.Datapath, store *maps.Store, ifindex int) error {
	return errors.Join(
		datapath.DetachUplink(ifindex),
		store.SetUplink(maps.Uplink{IfIndex: ifindex, Containers: true}),
	)
}

func removeUplinks(datapath *loader.Datapath, store *maps.Store, gone []int) error {
	var errs []error
	for _, index := range gone {
		errs = append(errs, datapath.DetachUplink(index), store.DeleteUplink(index))
	}
	return errors.Join(errs...)
}

// goneDevices returns those that no longer exist. A device that merely lost its
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
