package plugin

import (
	"cmp"
	"context"
	"errors"
	stdmaps "maps"
	"os"
	"slices"

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
//
// Devices take most of the time. GC deletes them by their index without a lock; ADDs wait only while
// GC removes the rest.
func (p *Plugin) GC(ctx context.Context, call *cni.Call) error {
	v, err := parseForRelease(call)
	if err != nil {
		return err
	}
	listed, err := call.ParseValidAttachments()
	if err != nil {
		return err
	}
	host, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer host.Close()

	records, err := record.Open(v.config.DataDir)
	if err != nil {
		return err
	}
	c := &collector{verb: v, host: host, records: records, listed: listed}
	before, err := c.look()
	if err != nil {
		return err
	}
	errDelete := c.deleteDevices(before)
	errSweep := c.sweep(ctx, before)
	if v.delegate != nil { // without a lock: it may take long, and others' ADDs wait for that
		errSweep = errors.Join(errSweep, v.delegate.gc(ctx))
	}
	return errors.Join(errDelete, errSweep)
}

// Orphans returns the attachments whose addresses GC would release if the runtime listed none: those
// without a device. It changes nothing.
func (p *Plugin) Orphans(ctx context.Context, call *cni.Call) (orphans []maps.Attachment, err error) {
	v, err := parseForRelease(call)
	if err != nil || v.config.IPAM == nil {
		return nil, err
	}
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	records, err := record.Open(v.config.DataDir)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(v.config.DataDir); err == nil { // each ADD creates it first
		lock, err := v.lockAgainstGC(ctx, flock.Exclusive)
		if err != nil {
			return nil, err
		}
		defer lock.Release()
	}
	c := &collector{verb: v, host: host, records: records}
	now, err := c.look()
	if err == nil {
		err = now.errRead
	}
	if err != nil {
		return nil, err
	}
	left, err := v.pool().Orphans(ctx, c.valid(nil, now.living()).HasReservation)
	for _, a := range left {
		orphans = append(orphans, maps.Attachment{Network: v.config.Attachment.Network, ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return orphans, err
}

// AddressesLeft returns an error if ADD could not reserve addresses.
func (p *Plugin) AddressesLeft(ctx context.Context, call *cni.Call) error {
	v, err := parse(call)
	if err != nil || v.config.IPAM == nil {
		return err
	}
	return v.pool().Available(ctx)
}

// collector is a GC in progress.
type collector struct {
	*verb
	host    *netlink.Handle
	records record.Dir
	listed  *config.ValidAttachments // by the runtime; nil: it lists none
}

// view is the state of the network that a GC reads.
type view struct {
	devices []netlink.Link // of the host
	pairs   map[loader.Owner]device
	known   map[loader.Owner]int // devices that the datapath knows, also those of other plugins
	records []*record.Record
	errRead error // what is not among these
}

// device is the host's device of an attachment.
type device struct {
	index int
	label names.Label
}

func (c *collector) look() (*view, error) {
	network := c.config.Attachment.Network
	devices, err := link.List(c.host)
	if err != nil {
		return nil, err
	}
	now := &view{devices: devices, pairs: map[loader.Owner]device{}}
	for _, found := range devices {
		if label, ok := names.ParseAlias(found.Attrs().Alias); ok && label.IsIn(network) {
			now.pairs[label.Owner] = device{found.Attrs().Index, label}
		}
	}
	errKnown := loader.IfLoaded(loader.OpenForRelease, func(datapath *loader.Datapath) (err error) {
		now.known, err = maps.DevicesIn(datapath, maps.NetworkToken(network))
		return err
	})
	now.records, err = c.records.List()
	now.errRead = errors.Join(errKnown, err)
	now.records = slices.DeleteFunc(now.records, func(r *record.Record) bool { return r.Attachment.Network != network })
	return now, nil
}

// living returns the devices of the attachments that have one: ours, or that of another plugin that a
// chained ebpfnet works on. If its record is lost, the datapath knows its owner.
func (now *view) living() map[loader.Owner]device {
	living := stdmaps.Clone(now.pairs)
	exists := map[int]bool{}
	for _, found := range now.devices {
		exists[found.Attrs().Index] = true
	}
	for owner, index := range now.known {
		if exists[index] {
			living[owner] = cmp.Or(living[owner], device{index, names.Label{Owner: owner}})
		}
	}
	for _, rec := range now.records {
		if rec.Chained != nil && exists[rec.Chained.HostIndex] {
			owner := rec.Attachment.Owner()
			living[owner] = device{rec.Chained.HostIndex, names.Label{Owner: owner, Attachment: rec.Attachment}}
		}
	}
	return living
}

// deleteDevices deletes the devices of attachments that the runtime does not list. Without a list,
// attachments with a device are alive.
func (c *collector) deleteDevices(now *view) error {
	if c.listed == nil {
		return nil
	}
	var dead []int
	for owner, pair := range now.pairs {
		if !c.listed.HasOwner(owner) {
			dead = append(dead, pair.index)
		}
	}
	return rtnl.DeleteLinks(c.host, now.devices, dead)
}

// sweep removes everything else, while no ADD is in progress. It keeps attachments that are newer than
// the runtime's list.
func (c *collector) sweep(ctx context.Context, before *view) error {
	lock, err := c.lockAgainstGC(ctx, flock.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Release()

	now, err := c.look()
	if err != nil {
		return err
	}
	valid := c.valid(before.living(), now.living())
	errAdopted := adopted{c.verb}.gc(ctx, valid, now.records) // adds to valid
	var errUnassigned error
	if valid.IsEmpty() {
		errUnassigned = AcceptUnassigned(valid.Network)
	}
	return errors.Join(
		now.errRead,
		errAdopted,
		sweepDatapath(ctx, valid, now.records),
		removeRecords(c.records, now.records, valid),
		c.releaseInvalid(ctx, valid),
		errUnassigned)
}

// valid returns the attachments to keep: those that the runtime lists and newer ones, or all that are
// alive if there is no list.
func (c *collector) valid(before, now map[loader.Owner]device) *config.ValidAttachments {
	valid := c.listed
	if valid == nil {
		valid, before = config.NewValidAttachments(c.config.Attachment.Network, nil), nil
	}
	for owner, living := range now {
		if before[owner].index == living.index {
			continue
		}
		valid.AddOwner(owner)
		if living.label.IsNamed() { // names the container, by which old reservations are found
			valid.Add(living.label.Attachment)
		}
	}
	return valid
}

// releaseInvalid releases the addresses of attachments that are not valid, except those of another IPAM plugin.
func (v *verb) releaseInvalid(ctx context.Context, valid *config.ValidAttachments) error {
	if v.config.IPAM == nil || v.delegate != nil {
		return nil
	}
	return v.pool().Retain(ctx, valid.HasReservation)
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
	return loader.IfLoaded(loader.OpenForRelease, func(datapath *loader.Datapath) error {
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
	})
}
