package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// ErrNoAttachment is wrapped by the error for a container that does not exist.
var ErrNoAttachment = errors.New("no such container")

// Set changes settings of running containers: of all in the filter's network, or of those with the
// filter's container ID and interface unless these are "". CHECK then expects the new settings,
// and DEL removes them. Under a stricter ingress policy, the connections that a container has opened
// continue. Set returns the names of the changed attachments, and warnings about connections that
// end although they should not. Without attachments, its error wraps ErrNoAttachment.
func (o *Host) Set(ctx context.Context, filter maps.Attachment, s record.Settings) (changed, warnings []string, err error) {
	err = maps.With(ctx, o.datapath, func(store *maps.Store) error {
		devices, err := maps.Devices(o.datapath)
		if err != nil {
			return err
		}
		for _, device := range devices {
			rec, err := o.recordOf(device)
			if err != nil {
				return err
			}
			if rec == nil || !matches(rec.Attachment, filter) {
				continue
			}
			warning, err := o.set(ctx, store, device, rec, s)
			if warning != nil {
				warnings = append(warnings, fmt.Sprintf("%s: connections that the container has opened may end: %v", names.Of(rec.Attachment), warning))
			}
			if err != nil {
				return err
			}
			changed = append(changed, names.Of(rec.Attachment))
		}
		return nil
	})
	if err == nil && len(changed) == 0 {
		err = fmt.Errorf("%w: %s", ErrNoAttachment, strings.TrimRight(filter.Network+"/"+filter.ContainerID+"/"+filter.IfName, "/"))
	}
	return changed, warnings, err
}

func matches(a, filter maps.Attachment) bool {
	return a.Network == filter.Network && (filter.ContainerID == "" || a.ContainerID == filter.ContainerID) &&
		(filter.IfName == "" || a.IfName == filter.IfName)
}

// recordOf returns the record of a device's attachment, a new one if there is none, and nil if the
// device is gone.
func (o *Host) recordOf(device maps.Device) (*record.Record, error) {
	rec, err := o.records.Read(device.Owner)
	if err != nil || rec != nil {
		return rec, err
	}
	end, err := link.Device(o.host, device.IfIndex)
	if err != nil || end == nil {
		return nil, err
	}
	label, ok := names.ParseAlias(end.Attrs().Alias)
	if !ok || label.Owner != device.Owner || !label.IsNamed() {
		return nil, nil
	}
	return &record.Record{Attachment: label.Attachment}, nil
}

// set writes the record before it changes anything, so that CHECK never misses a change. Its warning
// says why connections of the container may end.
func (o *Host) set(ctx context.Context, store *maps.Store, device maps.Device, rec *record.Record, s record.Settings) (warning, err error) {
	rec.Settings.Merge(s)
	if err := o.records.Write(rec); err != nil {
		return nil, err
	}
	c := config.Config{AntiSpoof: device.AntiSpoof, Ingress: device.IngressPolicy, Bandwidth: rec.Bandwidth}
	if err := c.Apply(rec.Settings); err != nil {
		return nil, err
	}
	before, shaped := device.IngressPolicy, c.Bandwidth.Ingress.Rate != 0
	if shaped && !device.Shaped {
		_ = returnOffloaded(ctx, o.datapath, func(e maps.Endpoint) bool { return e.Owner == device.Owner })
	}
	device.AntiSpoof, device.IngressPolicy, device.Shaped = c.AntiSpoof, c.Ingress, shaped
	if warning, err = o.putDevice(store, device, before); err != nil {
		return warning, err
	}
	if s.Limits == (record.Limits{}) {
		return warning, nil
	}
	return warning, o.limit(device.IfIndex, rec.Attachment.IfName, c.Bandwidth)
}

// putDevice writes the device's entry. Under a policy that is stricter than before, it first admits
// replies to the container's connections, and then once more for those that it has opened meanwhile.
func (o *Host) putDevice(store *maps.Store, device maps.Device, before maps.Policy) (warning, err error) {
	if device.IngressPolicy <= before {
		return nil, store.PutDevice(device)
	}
	warning = o.admitReplies(store, device)
	if err := store.PutDevice(device); err != nil || warning != nil {
		return warning, err
	}
	return o.admitReplies(store, device), nil
}

// limit changes the limits of a container that runs.
func (o *Host) limit(hostIndex int, ifName string, b link.Bandwidth) error {
	outside, ns, err := pairOf(o.host, hostIndex)
	if err != nil {
		return err
	}
	container, err := namespace.NewContainer(ns)
	if err != nil {
		return err
	}
	defer container.Close()

	inside, err := container.Netlink.LinkByName(ifName)
	if err != nil {
		return fmt.Errorf("find %s in the container: %w", ifName, err)
	}
	return b.Shape(o.host, container.Netlink, outside, inside)
}
