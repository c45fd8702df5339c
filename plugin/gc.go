package plugin

import (
	"context"
	"errors"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// GC removes what no valid attachment of this network needs (SPEC, section 2, GC). It continues
// after errors and reports all of them.
func (p *Plugin) GC(ctx context.Context, call *cni.Call) error {
	v, err := parseForRelease(call)
	if err != nil {
		return err
	}
	lock, err := v.lockAgainstGC(ctx, flock.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Release()

	host, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer host.Close()

	devices, err := networkDevices(host, v.config.Attachment.Network)
	if err != nil {
		return err
	}
	records, err := record.Open(v.config.DataDir)
	if err != nil {
		return err
	}
	recs, errRead := records.List()
	valid, err := validAttachments(call, host, devices, recs)
	if err != nil {
		return err
	}
	errDelete := deleteDevices(host, devices, valid)
	errSweep := sweepDatapath(ctx, valid, recs)
	errRemove := removeRecords(records, recs, valid)
	return errors.Join(errRead, errDelete, errSweep, errRemove, v.releaseInvalid(ctx, valid))
}

// releaseInvalid releases the addresses of attachments that are not valid.
func (v *verb) releaseInvalid(ctx context.Context, valid *config.ValidAttachments) error {
	if v.delegate != nil {
		return v.delegate.gc(ctx)
	}
	if v.config.IPAM == nil {
		return nil
	}
	_, err := v.pool().Retain(ctx, valid.HasReservation)
	return err
}

// validAttachments returns the attachments that the runtime lists, or those that are alive where it
// lists none.
func validAttachments(call *cni.Call, host *netlink.Handle, devices map[loader.Owner]netlink.Link, recs []*record.Record) (*config.ValidAttachments, error) {
	valid, err := call.ParseValidAttachments()
	if err != nil || valid != nil {
		return valid, err
	}
	living, err := livingAttachments(host, call.Network(), devices, recs)
	if err != nil {
		return nil, err
	}
	valid = config.NewValidAttachments(call.Network(), living)
	for owner := range devices {
		valid.AddOwner(owner)
	}
	return valid, nil
}

// livingAttachments returns the attachments of a network whose device exists, as far as they have names:
// the device is ours, or that of another plugin that a chained ebpfnet works on.
func livingAttachments(host *netlink.Handle, network string, devices map[loader.Owner]netlink.Link, recs []*record.Record) (living []maps.Attachment, err error) {
	for _, device := range devices {
		if label, _ := names.ParseAlias(device.Attrs().Alias); label.IsNamed() {
			living = append(living, label.Attachment)
		}
	}
	for _, rec := range recs {
		if rec.Attachment.Network != network || rec.Chained == nil {
			continue
		}
		device, err := link.Device(host, rec.Chained.HostIndex)
		if err != nil {
			return nil, err
		}
		if device != nil {
			living = append(living, rec.Attachment)
		}
	}
	return living, nil
}

// networkDevices returns the host's ends of a network's pairs, by the owner that their alias names.
func networkDevices(host *netlink.Handle, network string) (map[loader.Owner]netlink.Link, error) {
	all, err := link.List(host)
	if err != nil {
		return nil, err
	}
	devices := map[loader.Owner]netlink.Link{}
	for _, device := range all {
		if label, ok := names.ParseAlias(device.Attrs().Alias); ok && label.IsIn(network) {
			devices[label.Owner] = device
		}
	}
	return devices, nil
}

func deleteDevices(host *netlink.Handle, devices map[loader.Owner]netlink.Link, valid *config.ValidAttachments) error {
	var errs []error
	for owner, device := range devices {
		if !valid.HasOwner(owner) {
			errs = append(errs, link.Delete(host, device.Attrs().Name))
		}
	}
	return errors.Join(errs...)
}

// removeRecords removes the records of a network's attachments that are not valid.
func removeRecords(records record.Dir, recs []*record.Record, valid *config.ValidAttachments) error {
	var errs []error
	for _, rec := range recs {
		if valid.Lacks(rec.Attachment) {
			errs = append(errs, records.Remove(rec.Attachment.Owner()))
		}
	}
	return errors.Join(errs...)
}

// sweepDatapath removes the entries of the network's attachments that are not valid and entries
// without an owner, and detaches programs from the devices of other plugins.
func sweepDatapath(ctx context.Context, valid *config.ValidAttachments, recs []*record.Record) error {
	datapath, err := loader.OpenForRelease()
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer datapath.Close()

	return maps.With(ctx, datapath, func(store *maps.Store) error {
		owners, err := maps.Owners(datapath, maps.NetworkToken(valid.Network))
		stale := map[loader.Owner]bool{}
		for owner := range owners {
			stale[owner] = !valid.HasOwner(owner)
		}
		errs := []error{err, store.ReleaseAll(stale), store.RemoveOrphans()}
		for _, rec := range recs {
			if rec.Chained != nil && valid.Lacks(rec.Attachment) {
				errs = append(errs, datapath.DetachEndpoint(rec.Chained.HostIndex))
			}
		}
		return errors.Join(errs...)
	})
}
