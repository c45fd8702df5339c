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
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Del disconnects a container (SPEC, section 2, DEL). It needs neither the container's namespace nor
// a previous result, and succeeds where nothing is left to remove.
func (p *Plugin) Del(ctx context.Context, call *cni.Call) error {
	v, err := parseForRelease(call)
	if err != nil {
		return err
	}
	return v.release(ctx, call.Netns)
}

// release removes everything that ADD made, in reverse order. The addresses come last, so that no other
// container gets one while a map entry still has it, unless the IPAM plugin needs the link to release them.
func (v *verb) release(ctx context.Context, netns string) error {
	if v.delegate.needsLink() {
		errRelease := v.delegate.release(ctx)
		_, err := v.disconnect(ctx, netns)
		return errors.Join(errRelease, err)
	}
	releasable, err := v.disconnect(ctx, netns)
	if !releasable {
		return err
	}
	if v.delegate != nil {
		return errors.Join(err, v.delegate.release(ctx))
	}
	return errors.Join(err, v.pool().Release(ctx, v.reservation()))
}

// disconnect removes everything except the addresses: first the host ports, so that nothing comes
// in, then the device, so that nothing goes out, then the map entries. Each step runs even if
// earlier ones failed. releasable is false while entries may still have the addresses, and if the
// addresses belong to the plugin before.
func (v *verb) disconnect(ctx context.Context, netns string) (releasable bool, err error) {
	owner := v.config.Attachment.Owner()
	records, err := record.Open(v.config.DataDir)
	if err != nil {
		return false, err
	}
	rec, errRead := records.Read(owner)
	datapath, err := loader.OpenForRelease()
	if err == nil {
		defer datapath.Close()
		if rec == nil && !v.config.HasIPAM() {
			rec, err = v.recordOfDevice(datapath)
		}
		err = errors.Join(err, disconnectDevice(ctx, datapath, owner, rec.ChainedIndex()))
	} else if errors.Is(err, loader.ErrNotLoaded) {
		err = deleteDevice(owner)
	} else {
		err = errors.Join(err, deleteDevice(owner))
	}
	if errors.Is(err, flock.ErrBusy) {
		return false, err
	}
	isChained := rec.ChainedIndex() != 0
	if isChained {
		var errRestore error
		netns, errRestore = v.restore(rec, netns)
		err = errors.Join(err, errRestore)
	}
	isAdopted, errAdopted := adopted{v}.del(ctx, rec, netns)
	if errAdopted != nil {
		return false, errors.Join(err, errAdopted)
	}
	return !isChained || isAdopted, errors.Join(err, errRead, records.Remove(owner))
}

// recordOfDevice returns what a lost record said about the device of another plugin, or nil where the attachment has
// none: a chained one has no other trace.
func (v *verb) recordOfDevice(datapath *loader.Datapath) (*record.Record, error) {
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()

	device, err := findOtherDevice(host, datapath, v.config.Attachment.Owner())
	if err != nil || device == nil {
		return nil, err
	}
	return &record.Record{Attachment: v.config.Attachment, Chained: &record.Chained{HostIndex: device.Attrs().Index}}, nil
}

func disconnectDevice(ctx context.Context, datapath *loader.Datapath, owner loader.Owner, hostIndex int) error {
	errClose := withEntries(ctx, datapath, func(store *maps.Store) error { return store.CloseHostPorts(owner) })
	errDelete := deleteDevice(owner)
	return errors.Join(errClose, errDelete, removeEntries(ctx, datapath, owner, hostIndex, (*maps.Store).ReleaseClosed))
}

func deleteDevice(owner loader.Owner) error {
	host, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer host.Close()

	return link.Delete(host, names.HostDevice(owner))
}

// removeEntries removes an owner's map entries. If the device is ours, it is gone by then and its
// programs with it; hostIndex is the device of another plugin, which keeps it.
func removeEntries(ctx context.Context, datapath *loader.Datapath, owner loader.Owner, hostIndex int, remove func(*maps.Store, loader.Owner) error) error {
	return withEntries(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(remove(store, owner), datapath.DetachEndpoint(hostIndex))
	})
}

// withEntries is maps.With for a change that removes entries. If the datapath was unloaded meanwhile, they are gone.
func withEntries(ctx context.Context, datapath *loader.Datapath, change func(*maps.Store) error) error {
	err := maps.With(ctx, datapath, change)
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	return err
}

// restore removes the limits from the devices of another plugin, and restores what a chained ebpfnet has changed on the
// container's. It returns the path of the container's namespace, or "" if the device does not lead there: the path of a
// process that has ended may have become that of another container, or of a process of the host.
func (v *verb) restore(rec *record.Record, netns string) (path string, err error) {
	host, err := rtnl.Open()
	if err != nil {
		return "", err
	}
	defer host.Close()

	outside, err := link.Device(host, rec.Chained.HostIndex)
	if err != nil || outside == nil {
		return "", err
	}
	unshape := link.Unshape
	if rec.Bandwidth.IsEmpty() && rec.Settings.Limits == (record.Limits{}) {
		unshape = func(*netlink.Handle, netlink.Link) error { return nil } // a limit there is another tool's
	}
	errOutside := unshape(host, outside)
	container, err := namespace.OpenContainer(netns, v.ownNetns)
	if err != nil {
		return "", errOutside // it is gone, and with it what was changed there
	}
	defer container.Close()

	if elsewhere, err := link.LeadsElsewhere(host, outside, container.NS); elsewhere || err != nil {
		return "", errors.Join(errOutside, err)
	}
	inside, err := link.Find(container.Netlink, rec.Attachment.IfName)
	if err != nil || inside == nil {
		return netns, errors.Join(errOutside, err)
	}
	errTuning := rec.Chained.Before.Apply(container.NS, container.Netlink, rec.Attachment.IfName)
	return netns, errors.Join(errOutside, unshape(container.Netlink, inside), errTuning)
}
