package admin

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// ErrNoAttachment is wrapped by the error for a container that does not exist.
var ErrNoAttachment = errors.New("no such container")

var errPod = errors.New("only the node agent changes the rules of this pod")

// Set changes settings of running containers: of all in the filter's network, or of those with the filter's container ID and
// interface unless these are "". CHECK then expects the new settings, and DEL removes them. Connections that stricter rules do
// not admit end; others continue. Set returns the names of the changed attachments, and warnings about connections that end
// although they should not. Without attachments, its error wraps ErrNoAttachment.
func (o *Host) Set(ctx context.Context, filter maps.Attachment, s record.Settings) (changed, warnings []string, err error) {
	devices, err := maps.Devices(o.datapath)
	var unreadable []error // records, of any network
	for _, device := range devices {
		rec, errRead := o.recordOf(device)
		if errRead != nil {
			unreadable = append(unreadable, errRead)
			continue
		}
		if rec == nil || !matches(rec.Attachment, filter) {
			continue
		}
		isSet, warning, err := o.setDevice(ctx, device, s)
		if warning != nil {
			warnings = append(warnings, fmt.Sprintf("%s: %v", names.Of(rec.Attachment), warning))
		}
		if err != nil {
			return changed, warnings, err
		}
		if isSet {
			changed = append(changed, names.Of(rec.Attachment))
		}
	}
	if err == nil && len(changed) == 0 {
		err = errors.Join(unreadable...)
	}
	if err == nil && len(changed) == 0 {
		err = fmt.Errorf("%w: %s", ErrNoAttachment, strings.TrimRight(filter.Network+"/"+filter.ContainerID+"/"+filter.IfName, "/"))
	}
	return changed, warnings, err
}

// setDevice holds the lock for one container, because admitting its replies takes long. isSet is false if it has ended meanwhile.
func (o *Host) setDevice(ctx context.Context, device maps.Device, s record.Settings) (isSet bool, warning, err error) {
	err = maps.With(ctx, o.datapath, func(store *maps.Store) error {
		now, found, err := maps.GetDevice(o.datapath, device.IfIndex)
		if err != nil || !found || now.Owner != device.Owner {
			return err
		}
		rec, err := o.recordOf(now)
		if err != nil || rec == nil {
			return err
		}
		isSet = true
		warning, err = o.set(ctx, store, now, rec, s)
		return err
	})
	return isSet, warning, err
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
	before := *rec
	rec.Settings.Merge(s)
	policy, err := maps.GetPolicy(o.datapath, device.Policy)
	if err != nil {
		return nil, err
	}
	c := config.Config{Attachment: rec.Attachment, AntiSpoof: device.AntiSpoof, Audit: policy.IsAudit(), Bandwidth: rec.Bandwidth}
	if c.Ingress, err = ingressPolicyOf(o.datapath, policy, device.Network); err != nil {
		return nil, err
	}
	if err := c.Apply(rec.Settings); err != nil {
		return nil, err
	}
	if policy.IsPod && changesRules(s) {
		return nil, fmt.Errorf("%w: the namespace has NetworkPolicies", errPod)
	}
	if err := o.records.Write(rec); err != nil {
		return nil, err
	}
	var errReturn error
	shaped := c.Bandwidth.Ingress.Rate != 0
	if shaped && !device.Shaped {
		_, errReturn = returnOffloaded(ctx, o.datapath, func(e maps.Endpoint) bool { return e.Owner == device.Owner })
	}
	warning, err = o.setPolicy(store, &device, policy, &c, s)
	warning = errors.Join(mayEnd(offloadedOnes, errReturn), mayEnd("connections that the container has opened", warning))
	if err != nil {
		return warning, errors.Join(err, o.records.Write(&before))
	}
	device.AntiSpoof, device.Shaped = c.AntiSpoof, shaped
	if err := store.PutDevice(device); err != nil {
		return warning, err
	}
	if s.Limits == (record.Limits{}) {
		return warning, nil
	}
	return warning, o.limit(device.IfIndex, rec.Attachment.IfName, c.Bandwidth)
}

func changesRules(s record.Settings) bool {
	return s.Policy != "" || s.IngressPolicy != "" || s.PolicyMode != ""
}

// setPolicy gives the container the rules of the settings. When a direction becomes isolated, it first admits
// replies of the container's connections, and then once more for those that are new since.
func (o *Host) setPolicy(store *maps.Store, device *maps.Device, before maps.Policy, c *config.Config, s record.Settings) (warning, err error) {
	if !changesRules(s) {
		return nil, nil
	}
	ingress, egress := c.RuleSets()
	if s.Policy == "" && s.IngressPolicy == "" {
		if ingress, egress, err = maps.NewRuleSets(o.datapath).Of(before); err != nil {
			return nil, err
		}
	}
	for _, set := range []*maps.RuleSet{ingress, egress} {
		if set != nil {
			set.Audit = c.Audit
		}
	}
	isolates := ingress != nil && before.Ingress == 0 || egress != nil && before.Egress == 0
	if isolates {
		warning = o.admitReplies(store, *device)
	}
	if device.Policy, err = store.PutPolicy(device.Owner, ingress, egress); err != nil || !isolates || warning != nil {
		return warning, err
	}
	if err := store.PutDevice(*device); err != nil {
		return nil, err
	}
	return o.admitReplies(store, *device), nil
}

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

// maxOpened bounds the connections that a change of policy writes for one container.
const maxOpened = 4096

// admitReplies lets the connections of a container continue that its rules admit, when a direction of it
// becomes isolated. Connections of a container with a network stack of its own, as in a virtual machine,
// cannot be seen.
func (o *Host) admitReplies(store *maps.Store, device maps.Device) error {
	_, ns, err := pairOf(o.host, device.IfIndex)
	if err != nil {
		return err
	}
	defer ns.Close()

	opened, accepted, err := namespace.Connections(ns)
	if err != nil {
		return err
	}
	opened, accepted = correctOpeners(opened, accepted)
	err = errors.Join(
		store.AdmitReplies(device.Owner, maps.OpenedByContainer, connections(opened)),
		store.AdmitReplies(device.Owner, maps.OpenedByRemote, connections(accepted)),
	)
	if n := len(opened) + len(accepted); err == nil && max(len(opened), len(accepted)) > maxOpened {
		err = fmt.Errorf("it has %d, and at most %d of each direction are kept", n, maxOpened)
	}
	return err
}

// correctOpeners moves connections that conntrack knows to be opened from outside: a server that has closed its listener looks
// like a client. Without conntrack, or where connections bypass it, that is not known.
func correctOpeners(opened, accepted []namespace.Connection) (stillOpened, nowAccepted []namespace.Connection) {
	isAccepted := map[namespace.Connection]bool{}
	err := rtnl.TrackedConnections(func(t rtnl.Tracked) {
		isAccepted[namespace.Connection{Protocol: t.Protocol, Local: t.Server, Remote: t.Client}] = true
	})
	if err != nil {
		return opened, accepted
	}
	for _, c := range opened {
		if isAccepted[c] {
			accepted = append(accepted, c)
		} else {
			stillOpened = append(stillOpened, c)
		}
	}
	return stillOpened, accepted
}

func connections(sockets []namespace.Connection) (list []maps.Connection) {
	for _, c := range sockets[:min(len(sockets), maxOpened)] {
		list = append(list, maps.Connection{Protocol: maps.Protocol(c.Protocol), Local: c.Local, Remote: c.Remote})
	}
	return list
}
