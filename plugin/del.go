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

// release removes all that ADD made, in reverse: what connects the container, and the
// addresses last, so that none is given out again while an entry names it, unless they
// are given back by the device.
func (p *Plugin) release(ctx context.Context, config *Config, netns string) error {
	if config.Delegate.asksOnLink() {
		released := config.Delegate.release(ctx)
		_, err := p.disconnect(ctx, config, netns)
		return errors.Join(released, err)
	}
	idle, err := p.disconnect(ctx, config, netns)
	if !idle {
		return err
	}
	if config.Delegate != nil {
		return errors.Join(err, config.Delegate.release(ctx))
	}
	return errors.Join(err, p.pool(config).Release(ctx, ipamAttachment(config.Attachment)))
}

// disconnect removes all but the addresses: host ports, so that nothing comes in; the
// device, so that nothing goes out; and what the datapath knows. Each step runs whatever
// became of those before it. idle says that the addresses can be released: they are not of
// the plugin before, and no entry names them.
func (p *Plugin) disconnect(ctx context.Context, config *Config, netns string) (idle bool, err error) {
	owner := config.Attachment.Owner()
	records, err := record.Open(config.DataDir)
	if err != nil {
		return false, err
	}
	kept, unread := records.Read(owner)
	chained, hostIndex := kept != nil && kept.Chained != nil, 0
	if chained {
		hostIndex = kept.Chained.HostIndex
	}
	datapath, err := loader.OpenForRelease()
	if err == nil {
		defer datapath.Close()
		err = releaseDevice(ctx, datapath, owner, hostIndex)
	} else if errors.Is(err, loader.ErrNotLoaded) {
		err = deleteDevice(owner)
	} else {
		err = errors.Join(err, deleteDevice(owner))
	}
	if errors.Is(err, flock.ErrBusy) {
		return false, err
	}
	return !chained, errors.Join(err, unread, unlimit(kept, netns), restore(kept, netns), records.Remove(owner))
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
	closed := maps.With(ctx, datapath, func(store *maps.Store) error { return store.CloseHostPorts(owner) })
	deleted := deleteDevice(owner)
	return errors.Join(closed, deleted, releaseEntries(ctx, datapath, owner, hostIndex, (*maps.Store).ReleaseClosed))
}

func deleteDevice(owner loader.Owner) error {
	host, err := openHandle()
	if err != nil {
		return err
	}
	defer host.Close()

	return link.Delete(host, hostName(owner))
}

// releaseEntries removes an owner's map entries. Its device is gone by then, and the
// programs with it, if it is ours; else hostIndex is the one that they are on.
func releaseEntries(ctx context.Context, datapath *loader.Datapath, owner loader.Owner, hostIndex int, release func(*maps.Store, loader.Owner) error) error {
	return maps.With(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(release(store, owner), datapath.DetachEndpoint(hostIndex))
	})
}
