package plugin

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Del disconnects a container (SPEC, section 2, DEL). It needs neither the
// namespace nor a previous result, and succeeds where there is nothing to do.
func (p *Plugin) Del(ctx context.Context, args *skel.CmdArgs) error {
	config, err := parseForRelease(args)
	if err != nil {
		return err
	}
	return p.release(ctx, config, args.Netns)
}

// release removes all that ADD made, in reverse: host ports, so that nothing
// comes in; the device, so that nothing goes out; what the datapath knows; and
// the addresses last, so that none is given out again while an entry names it.
// Each step runs whatever became of those before it.
func (p *Plugin) release(ctx context.Context, config *Config, netns string) error {
	owner := config.Attachment.Owner()
	records, err := record.Open(config.DataDir)
	if err != nil {
		return err
	}
	kept, unread := records.Read(owner)
	hostIndex := 0
	if kept != nil && kept.Chained != nil {
		hostIndex = kept.Chained.HostIndex
	}
	datapath, err := loader.OpenLoaded()
	if err == nil {
		defer datapath.Close()
		err = releaseDevice(ctx, datapath, owner, hostIndex)
	} else if errors.Is(err, loader.ErrNotLoaded) {
		err = deleteDevice(owner)
	} else {
		err = errors.Join(err, deleteDevice(owner))
	}
	if errors.Is(err, flock.ErrBusy) {
		return err // entries may name the addresses still
	}
	err = errors.Join(err, unread, unlimit(kept, netns), restore(kept, netns), records.Remove(owner))
	if kept != nil && kept.Chained != nil {
		return err // the addresses are of the plugin before
	}
	if config.Delegate != nil {
		return errors.Join(err, config.Delegate.release(ctx))
	}
	pool := ipam.Open(config.addressesForRelease(), p.Log)
	return errors.Join(err, pool.Release(ctx, ipamAttachment(config.Attachment)))
}

// addressesForRelease is where the addresses are; the configuration may have lost its
// "ipam" since ADD.
func (c *Config) addressesForRelease() *ipam.Config {
	if c.IPAM != nil {
		return c.IPAM
	}
	return &ipam.Config{Network: c.Attachment.Network}
}

func releaseDevice(ctx context.Context, datapath *loader.Datapath, owner loader.Owner, hostIndex int) error {
	closed := maps.With(ctx, datapath, func(store *maps.Store) error { return store.ClosePorts(owner) })
	deleted := deleteDevice(owner)
	return errors.Join(closed, deleted, releaseEntries(ctx, datapath, owner, hostIndex))
}

func deleteDevice(owner loader.Owner) error {
	host, err := openHandle()
	if err != nil {
		return err
	}
	defer host.Close()

	return link.Delete(host, hostName(owner))
}

// releaseEntries removes an owner's map entries and link pins. Its device is gone
// by then, if it is ours; else hostIndex is the one that the programs are on.
func releaseEntries(ctx context.Context, datapath *loader.Datapath, owner loader.Owner, hostIndex int) error {
	return maps.With(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(store.Release(owner), datapath.DetachEndpoint(owner, hostIndex))
	})
}
