// Package admin has the operations of an operator: it lists attachments, changes settings of running
// containers, repairs what other tools have damaged, and unloads the datapath. ebpfnetctl prints its
// results.
package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Host works on the datapath of one host network namespace.
type Host struct {
	datapath *loader.Datapath
	host     *netlink.Handle
	records  record.Dir
	ends     map[loader.Owner]hostEnd
}

// hostEnd is the host's end of an attachment's pair of devices.
type hostEnd struct {
	index     int
	name      string
	title     string // names the attachment in messages
	isChained bool
}

// Open opens the datapath of the calling thread's network namespace with one of package loader's
// functions, whose errors it passes on. dataDir is the directory of the records, "" for the default.
// The caller must call Close.
func Open(open func() (*loader.Datapath, error), dataDir string) (*Host, error) {
	o, err := openHost(open)
	if err != nil {
		return nil, err
	}
	if err := o.findEnds(config.DataDir(dataDir)); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

// openHost opens the datapath and netlink. The caller must call Close.
func openHost(open func() (*loader.Datapath, error)) (*Host, error) {
	datapath, err := open()
	if err != nil {
		return nil, err
	}
	host, err := rtnl.Open()
	if err != nil {
		datapath.Close()
		return nil, err
	}
	return &Host{datapath: datapath, host: host, ends: map[loader.Owner]hostEnd{}}, nil
}

// Close closes the datapath and netlink.
func (o *Host) Close() {
	o.datapath.Close()
	o.host.Close()
}

func (o *Host) devices() (map[int]netlink.Link, error) {
	list, err := link.List(o.host)
	byIndex := map[int]netlink.Link{}
	for _, device := range list {
		byIndex[device.Attrs().Index] = device
	}
	return byIndex, err
}

// findEnds finds the host's ends of living attachments: ours by their alias, those of chained
// attachments by their record.
func (o *Host) findEnds(dataDir string) error {
	devices, err := link.List(o.host)
	if err != nil {
		return err
	}
	if o.records, err = record.Open(dataDir); err != nil {
		return err
	}
	recs, _ := o.records.List() // those that are readable
	recorded, chained := map[loader.Owner]string{}, map[int]loader.Owner{}
	for _, rec := range recs {
		owner := rec.Attachment.Owner()
		recorded[owner] = names.Of(rec.Attachment)
		if rec.Chained != nil {
			chained[rec.Chained.HostIndex] = owner
		}
	}
	for _, device := range devices {
		attrs := device.Attrs()
		label, ok := names.ParseAlias(attrs.Alias)
		isChained := !ok
		if isChained {
			label.Owner, ok = chained[attrs.Index]
		}
		if ok {
			o.ends[label.Owner] = hostEnd{attrs.Index, attrs.Name, cmp.Or(recorded[label.Owner], attrs.Alias), isChained}
		}
	}
	return nil
}

// Warnings returns the problems of the host that hinder the datapath.
func (o *Host) Warnings() (warnings []string, err error) {
	uplinks, err := o.Uplinks()
	for _, uplink := range uplinks {
		if warning := link.BridgeNetfilter(uplink); warning != "" {
			warnings = append(warnings, warning)
		}
	}
	rules, errRules := o.rulesWarning()
	if rules != "" {
		warnings = append(warnings, rules)
	}
	return warnings, errors.Join(err, errRules)
}

// rulesWarning returns a warning if fastPath always is in use and policy rules hinder it.
func (o *Host) rulesWarning() (string, error) {
	rules, err := maps.ReadRouteRules(o.datapath)
	if err != nil || rules == (maps.RouteRules{}) {
		return "", err
	}
	var hindered []string
	for family, unfollowed := range map[string]bool{"IPv4": rules.IPv4, "IPv6": rules.IPv6} {
		if unfollowed {
			hindered = append(hindered, family)
		}
	}
	slices.Sort(hindered)
	endpoints, err := maps.Endpoints(o.datapath)
	isAlways := func(e maps.Endpoint) bool { return e.FastPath == maps.FastPathAlways }
	if err != nil || !slices.ContainsFunc(endpoints, isAlways) {
		return "", err
	}
	return fmt.Sprintf("policy rules of the host for %s choose by mark, TOS or suppressed routes: fastPath always acts as established "+
		"towards the outside, until a STATUS or repair without such rules", strings.Join(hindered, " and ")), nil
}

// Usage counts what depends on the datapath.
type Usage struct {
	Containers []string
	Uplinks    []string
	HostPorts  int // entries
	Flows      int // that have not expired
}

// Usage counts what depends on the datapath of any version. The uplinks of another version are
// unknown.
func (o *Host) Usage() (*Usage, error) {
	u := &Usage{}
	for _, end := range o.ends {
		u.Containers = append(u.Containers, end.title)
	}
	uplinks, err := o.Uplinks()
	for _, uplink := range uplinks {
		u.Uplinks = append(u.Uplinks, uplink.Attrs().Name)
	}
	slices.Sort(u.Containers)
	slices.Sort(u.Uplinks)
	ports, errPorts := maps.Entries(o.datapath.HostPorts)
	u.HostPorts = ports
	errFlows := loader.IfLoaded(loader.OpenLoaded, func(datapath *loader.Datapath) error {
		flows, err := maps.CountFlows(datapath)
		for _, n := range flows {
			u.Flows += n
		}
		return err
	})
	if errors.Is(errFlows, loader.ErrIncompatible) { // those of another layout are not counted
		errFlows = nil
	}
	return u, errors.Join(err, errPorts, errFlows)
}

// Uplinks returns the uplinks whose device exists.
func (o *Host) Uplinks() ([]netlink.Link, error) {
	all, err := maps.Uplinks(o.datapath)
	if err != nil {
		return nil, err
	}
	var present []netlink.Link
	for _, uplink := range all {
		device, err := link.Device(o.host, uplink.IfIndex)
		if err != nil {
			return nil, err
		}
		if device != nil && !uplink.ContainerBridge {
			present = append(present, device)
		}
	}
	return present, nil
}

// Unload detaches all programs and removes all pins. Devices, addresses and routes of containers
// remain: containers reach each other and the host, but nothing is translated. Its warning says why connections may end that
// need no translation.
func (o *Host) Unload(ctx context.Context) (warning, err error) {
	warning = loader.IfLoaded(loader.OpenLoaded, func(datapath *loader.Datapath) error { // of this version's layout
		_, err := returnOffloaded(ctx, datapath, func(maps.Endpoint) bool { return true })
		return err
	})
	return mayEnd(offloadedOnes, warning), o.datapath.Unload(ctx)
}

// returnOffloaded prepares conntrack for offloaded TCP connections that are about to pass the stack again: else their
// packets are invalid. They are those of some endpoints. It returns their number.
func returnOffloaded(ctx context.Context, datapath *loader.Datapath, of func(maps.Endpoint) bool) (number int, err error) {
	endpoints, errEndpoints := maps.Endpoints(datapath)
	entries, errEntries := maps.OffloadEntries(datapath)
	returns := map[netip.Addr]bool{}
	for _, e := range endpoints {
		returns[e.Addr] = of(e)
	}
	var connections [][2]netip.AddrPort
	for _, e := range entries {
		if e.Protocol == maps.TCP && !e.Expired && (returns[e.Sides[0].Addr()] || returns[e.Sides[1].Addr()]) {
			number++
			connections = append(connections, e.Sides)
			if e.CT != 0 { // conntrack has only the server's packets with this tuple
				connections = append(connections, [2]netip.AddrPort{e.Sides[1], e.Sides[0]})
			}
		}
	}
	if err = errors.Join(errEndpoints, errEntries); err == nil && number > 0 {
		err = rtnl.BeLiberal(ctx, connections)
	}
	return number, err
}

const offloadedOnes = "where a rule drops ct state invalid and net.netfilter.nf_conntrack_tcp_be_liberal is not 1, " +
	"TCP connections that bypassed the stack"

// mayEnd says what an error means to some connections.
func mayEnd(some string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s may end: %w", some, err)
}

// Connected returns the names of the containers whose devices are on this host, also without a loaded
// datapath or with one of another version. dataDir is the directory of the records, "" for the default.
func Connected(dataDir string) (containers []string, err error) {
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	o := &Host{host: host, ends: map[loader.Owner]hostEnd{}}
	if err := o.findEnds(config.DataDir(dataDir)); err != nil {
		return nil, err
	}
	known := map[int]bool{}
	for _, end := range o.ends {
		containers = append(containers, end.title)
		known[end.index] = true
	}
	slices.Sort(containers)
	others, err := o.otherDevices(known)
	return append(containers, others...), err
}

// otherDevices names devices of containers that have their records in another directory.
func (o *Host) otherDevices(known map[int]bool) (devices []string, err error) {
	err = loader.IfLoaded(loader.OpenForRelease, func(datapath *loader.Datapath) error {
		// In every version, an entry begins with the owner and its key is the index.
		var index uint32
		value := make([]byte, datapath.Devices.ValueSize())
		entries := datapath.Devices.Iterate()
		for entries.Next(&index, &value) {
			if known[int(index)] {
				continue
			}
			device, err := link.Device(o.host, int(index))
			if err != nil {
				return err
			}
			if device != nil {
				devices = append(devices, "the one behind "+device.Attrs().Name)
			}
		}
		return entries.Err()
	})
	return devices, err
}
