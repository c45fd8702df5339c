package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// These steps of ADD make the interface, or change it.

func (a *adder) createPair(context.Context) error {
	if _, ipv6 := link.Families(a.addresses); ipv6 {
		if err := link.CheckIPv6(); err != nil {
			return err
		}
	}
	a.pair = link.Pair{
		Kind:          a.config.Device,
		HostName:      names.HostDevice(a.owner),
		ContainerName: a.config.Attachment.IfName,
		HostMAC:       names.HostMAC(a.owner),
		ContainerMAC:  a.config.MAC,
		MTU:           a.config.MTU,
	}
	var err error
	if a.pair.MTU == 0 {
		if a.pair.MTU, err = link.OutsideMTU(a.host); err != nil {
			return err
		}
	}
	if a.pair.ContainerMAC == nil {
		a.pair.ContainerMAC = names.ContainerMAC(a.owner)
	}
	err = a.pair.Create(a.host, a.container.NS, names.Alias(a.config.Attachment))
	if errors.Is(err, unix.EEXIST) {
		return a.nameInUse(err)
	}
	if err != nil {
		return err
	}
	a.undo.push(func(context.Context) error { return link.Delete(a.host, a.pair.HostName) })
	return nil
}

// nameInUse reports which of the two names is in use.
func (a *adder) nameInUse(err error) error {
	if device, findErr := link.Find(a.host, a.pair.HostName); findErr != nil || device == nil {
		return cnierr.InvalidEnv("CNI_IFNAME", a.pair.ContainerName, fmt.Sprintf("a name that no interface of the container has (%v)", err))
	}
	return a.exists()
}

// exists reports an attachment that is alive.
func (a *adder) exists() error {
	attachment, device := a.config.Attachment, names.HostDevice(a.owner)
	if a.isChained() {
		device = a.pair.HostName
	}
	return cnitypes.NewError(cnierr.CodeAttachmentExists, fmt.Sprintf(
		"container %s already has interface %s in network %s, with the host's device %s: DEL it first",
		attachment.ContainerID, attachment.IfName, attachment.Network, device), "")
}

// raiseLink lets an IPAM plugin send requests over the link. The container's end has no address yet. The
// host's end gets the default gateway's address, by which DHCP servers recognize the link of a request.
func (a *adder) raiseLink(context.Context) error {
	return link.RaiseWith(a.host, a.pair, link.DefaultGateway(netip.IPv4Unspecified()))
}

func (a *adder) setUpHost(ctx context.Context) error {
	if err := a.enableForwarding(ctx); err != nil {
		return err
	}
	return link.SetUpHost(a.host, a.pair, a.addresses)
}

func (a *adder) enableForwarding(context.Context) error {
	return link.EnableForwarding(link.Families(a.addresses))
}

// sizePackets chooses the largest TCP packets of the container, which depend on the uplinks.
func (a *adder) sizePackets(context.Context) error {
	if !a.config.BigTCP {
		return nil
	}
	sizes, err := link.BigTCPFor(a.host, a.pair.MTU, a.uplinks)
	if err != nil {
		return err
	}
	return a.pair.SizePackets(a.host, sizes)
}

func (a *adder) setUpContainer(context.Context) error {
	addresses := slices.Clone(a.addresses)
	if a.container.IsOwn {
		for i := range addresses {
			addresses[i].Gateway = netip.Addr{} // it is the namespace's own address
		}
	}
	return link.SetUpContainer(a.container.NS, a.container.Netlink, a.pair, addresses, a.routes)
}

// tune restores an interface of another plugin on undo. Our own goes with its device.
func (a *adder) tune(context.Context) error {
	tuning := a.config.Tuning
	if tuning.IsEmpty() {
		return nil
	}
	if a.isChained() {
		before, err := tuning.Present(a.container.NS, a.container.Netlink, a.pair.ContainerName)
		if err != nil {
			return err
		}
		a.undo.push(func(context.Context) error {
			return before.Apply(a.container.NS, a.container.Netlink, a.pair.ContainerName)
		})
	}
	return tuning.Apply(a.container.NS, a.container.Netlink, a.pair.ContainerName)
}

// limit removes the limits of another plugin's interface on undo, as tune does.
func (a *adder) limit(context.Context) error {
	if a.config.Bandwidth.IsEmpty() {
		return nil
	}
	outside, err := a.host.LinkByIndex(a.pair.HostIndex)
	if err != nil {
		return fmt.Errorf("find device %d: %w", a.pair.HostIndex, err)
	}
	inside, err := a.container.Netlink.LinkByName(a.pair.ContainerName)
	if err != nil {
		return fmt.Errorf("find %s in the container: %w", a.pair.ContainerName, err)
	}
	if a.isChained() {
		a.undo.push(func(context.Context) error {
			return link.Bandwidth{}.Shape(a.host, a.container.Netlink, outside, inside)
		})
	}
	return a.config.Bandwidth.Shape(a.host, a.container.Netlink, outside, inside)
}

// writeRecord records what DEL and others cannot read from the kernel, before ADD changes it.
func (a *adder) writeRecord(ctx context.Context) error {
	rec := a.newRecord()
	if a.isChained() {
		before, err := a.config.Tuning.Present(a.container.NS, a.container.Netlink, a.pair.ContainerName)
		if err != nil {
			return err
		}
		rec.Chained = &record.Chained{HostIndex: a.pair.HostIndex, Before: before}
	}
	if rec.IsEmpty() {
		return nil
	}
	records, err := record.Open(a.config.DataDir)
	if err != nil {
		return err
	}
	if old, err := records.Read(a.owner); err == nil && old != nil && old.Chained != nil {
		if old.Chained.HostIndex == a.pair.HostIndex {
			return a.exists()
		}
		const gone = "" // the namespace in which something could be restored
		if err := a.release(ctx, gone); err != nil {
			return err
		}
	}
	a.undo.push(func(context.Context) error { return records.Remove(a.owner) })
	return records.Write(rec)
}

func (v *verb) newRecord() *record.Record {
	return &record.Record{
		Attachment: v.config.Attachment,
		Aliases:    v.config.Aliases,
		CgroupPath: v.config.CgroupPath,
		Labels:     v.config.Labels,
		Uplinks:    v.config.Uplinks,
		Bandwidth:  v.config.Bandwidth,
	}
}
