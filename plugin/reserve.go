package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// reserve takes the addresses. A reservation of this attachment without a
// device is that of a container that is gone, or of an ADD that was killed: the
// new one gets the same addresses.
func (a *addition) reserve(ctx context.Context) error {
	if a.config.Delegate != nil {
		return a.haveReserved(ctx, a.config.Delegate)
	}
	if a.config.IPAM == nil { // an interface without addresses
		a.reserved = &ipam.Result{}
		return nil
	}
	pool := a.pool(a.config)
	attachment := ipamAttachment(a.config.Attachment)
	reserved, err := pool.Reserve(ctx, attachment)
	if errors.Is(err, ipam.ErrDuplicate) {
		if err := a.clearDead(ctx); err != nil {
			return err
		}
		reserved, err = pool.Replace(ctx, attachment)
	}
	if err != nil {
		return fmt.Errorf("reserve addresses: %w", err)
	}
	a.undo.push(func(ctx context.Context) error { return pool.Release(ctx, attachment) })
	a.useReserved(reserved)
	return nil
}

// haveReserved has another plugin give the addresses. Its DEL follows on its own ADD if that
// fails, too (SPEC, section 4).
func (a *addition) haveReserved(ctx context.Context, d *delegate) error {
	a.undo.push(d.release)
	reserved, err := d.reserve(ctx)
	if err != nil {
		return err
	}
	a.useReserved(reserved)
	return nil
}

func (a *addition) useReserved(reserved *ipam.Result) {
	a.reserved = reserved
	for _, address := range reserved.Addresses {
		a.addresses = append(a.addresses, link.Address(address))
	}
}

// checkDead refuses to replace an attachment that lives.
func (a *addition) checkDead() error {
	device, err := link.Find(a.host, hostName(a.owner))
	if err != nil {
		return err
	}
	if device != nil {
		return a.exists()
	}
	return nil
}

// clearDead removes what is left of this attachment but its addresses, unless it lives.
func (a *addition) clearDead(ctx context.Context) error {
	if err := a.checkDead(); err != nil {
		return err
	}
	_, err := a.disconnect(ctx, a.config, a.netns)
	return err
}

// clearLeft removes all that is left of this attachment, unless it lives, where no
// reservation of ours tells of a container that is gone.
func (a *addition) clearLeft(ctx context.Context) error {
	if err := a.checkDead(); err != nil {
		return err
	}
	datapath, err := loader.OpenLoaded()
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer datapath.Close()

	endpoints, err := maps.Endpoints(datapath)
	if err != nil || !slices.ContainsFunc(endpoints, func(e maps.Endpoint) bool { return e.Owner == a.owner }) {
		return err
	}
	return a.release(ctx, a.config, a.netns)
}

func (a *addition) exists() error {
	at, device := a.config.Attachment, hostName(a.owner)
	if a.config.PrevResult != nil {
		device = a.pair.HostName
	}
	return cnitypes.NewError(CodeAttachmentExists, fmt.Sprintf(
		"container %s has interface %s in network %s already, by device %s of the host: DEL it first",
		at.ContainerID, at.IfName, at.Network, device), "")
}
