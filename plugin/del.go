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
)

// Del disconnects a container (SPEC, section 2, DEL). It needs neither the
// namespace nor a previous result, and succeeds where there is nothing to do.
func (p *Plugin) Del(ctx context.Context, args *skel.CmdArgs) error {
	config, err := parseForRelease(args)
	if err != nil {
		return err
	}
	return p.release(ctx, config)
}

// release removes all that ADD made, in reverse: host ports, so that nothing
// comes in; the device, so that nothing goes out; what the datapath knows; and
// the addresses last, so that none is given out again while an entry names it.
// Each step runs whatever became of those before it.
func (p *Plugin) release(ctx context.Context, config *Config) error {
	owner := config.Attachment.Owner()
	datapath, err := loader.OpenLoaded()
	if err == nil {
		defer datapath.Close()
		err = releaseDevice(ctx, datapath, owner)
	} else if errors.Is(err, loader.ErrNotLoaded) {
		err = deleteDevice(owner)
	} else {
		err = errors.Join(err, deleteDevice(owner))
	}
	if errors.Is(err, flock.ErrBusy) {
		return err // entries may name the addresses still
	}
	pool := ipam.Open(config.IPAM, p.Log)
	return errors.Join(err, pool.Release(ctx, ipamAttachment(config.Attachment)))
}

func releaseDevice(ctx context.Context, datapath *loader.Datapath, owner loader.Owner) error {
	closed := maps.With(ctx, datapath, func(store *maps.Store) error { return store.ClosePorts(owner) })
	deleted := deleteDevice(owner)
	return errors.Join(closed, deleted, releaseEntries(ctx, datapath, owner))
}

func deleteDevice(owner loader.Owner) error {
	host, err := openHandle()
	if err != nil {
		return err
	}
	defer host.Close()

	return link.Delete(host, hostName(owner))
}

// releaseEntries removes an owner's map entries and link pins. Its device is gone by then.
func releaseEntries(ctx context.Context, datapath *loader.Datapath, owner loader.Owner) error {
	return maps.With(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(store.Release(owner), datapath.DetachEndpoint(owner, 0))
	})
}
