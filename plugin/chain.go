package plugin

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// After another plugin, ebpfnet works on the interface that that plugin has made:
// masquerading, host ports and tuning, with the addresses of its result, which is
// passed on as it is. The device and the addresses stay that plugin's.

const thatPlugins = "after another plugin the interface is that plugin's"

// checkChained refuses what is the business of the plugin that makes the interface.
func checkChained(c *Config) error {
	switch {
	case c.PrevResult == nil:
		return nil
	case c.IPAM != nil || c.Delegate != nil:
		return unsupported("prevResult", c.PrevResult, `with "ipam" ebpfnet makes the interface itself, so it must be the first plugin of its list`)
	case c.MTU != 0:
		return unsupported("mtu", c.MTU, thatPlugins)
	case c.Device != "":
		return unsupported("device", c.Device, thatPlugins)
	case c.FastPath != "" && c.FastPath != maps.FastPathNever:
		return unsupported("fastPath", c.FastPath, "after another plugin the way of packets is that plugin's")
	default:
		return nil
	}
}

// findInterface takes the interface and its addresses from prevResult.
func (a *addition) findInterface(context.Context) error {
	prev := a.config.PrevResult
	index := interfaceOf(prev, a.config.Attachment.IfName)
	if index < 0 {
		return invalid("prevResult.interfaces", prev.Interfaces, "one named "+a.config.Attachment.IfName+" with a sandbox")
	}
	var err error
	if a.pair, err = a.pairBehind(a.config.Attachment.IfName); err != nil {
		return err
	}
	if asked := a.config.MAC; asked != nil && asked.String() != a.pair.ContainerMAC.String() {
		return unsupported("mac", asked.String(), thatPlugins+", with the MAC "+a.pair.ContainerMAC.String()+"; give the capability to that plugin")
	}
	a.routeTo = map[netip.Addr]int{}
	for _, ip := range prev.IPs {
		if ip.Interface != nil && *ip.Interface != index {
			continue
		}
		address := link.Address{Prefix: prefixOf(ip.Address)}
		route, err := link.RouteTo(a.host, address.Prefix.Addr())
		if err != nil {
			return err
		}
		a.routeTo[address.Prefix.Addr()] = route.Device
		gateway, known := netip.AddrFromSlice(ip.Gateway)
		if !known {
			gateway = route.Source // the host's own address on the way to it
		}
		address.Gateway = gateway.Unmap()
		a.addresses = append(a.addresses, address)
	}
	return nil
}

// interfaceOf returns the index of the container's interface in a result, or -1.
func interfaceOf(result *types100.Result, name string) int {
	return slices.IndexFunc(result.Interfaces, func(i *types100.Interface) bool {
		return i.Sandbox != "" && i.Name == name
	})
}

// pairBehind returns the veth pair of the container's interface. Only of a veth
// all packets pass a device of the host, where programs can be.
func (a *addition) pairBehind(name string) (link.Pair, error) {
	inside, err := link.Find(a.container.handle, name)
	if err != nil {
		return link.Pair{}, err
	}
	if inside == nil {
		return link.Pair{}, invalid("prevResult.interfaces", name, "an interface that the container has")
	}
	if _, isVeth := inside.(*netlink.Veth); !isVeth {
		return link.Pair{}, unsupported("prevResult.interfaces", name, fmt.Sprintf(
			"it is a %s, whose packets pass no device of the host; ebpfnet can follow plugins that make a veth, like bridge and ptp", inside.Type()))
	}
	outside, err := link.Device(a.host, inside.Attrs().ParentIndex)
	if err != nil {
		return link.Pair{}, err
	}
	if outside == nil || outside.Attrs().ParentIndex != inside.Attrs().Index {
		return link.Pair{}, invalid("prevResult.interfaces", name, "a veth whose other end is on the host")
	}
	return link.Pair{
		HostName:      outside.Attrs().Name,
		HostIndex:     outside.Attrs().Index,
		HostMAC:       outside.Attrs().HardwareAddr,
		ContainerName: name,
		ContainerMAC:  inside.Attrs().HardwareAddr,
		MTU:           inside.Attrs().MTU,
		Bridge:        outside.Attrs().MasterIndex,
	}, nil
}

func (a *addition) enableForwarding(context.Context) error {
	return link.EnableForwarding(a.families())
}

// keepRecord writes down what DEL and others cannot find out: before anything that
// it tells of is changed.
func (a *addition) keepRecord(ctx context.Context) error {
	r := recordOf(a.config)
	if a.config.PrevResult != nil {
		before, err := a.config.Tuning.Present(a.container.ns, a.container.handle, a.pair.ContainerName)
		if err != nil {
			return err
		}
		r.Chained = &record.Chained{HostIndex: a.pair.HostIndex, Before: before}
	}
	if r.IsEmpty() {
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
		const elsewhere = "" // what it was restored in is gone with it
		if err := a.release(ctx, a.config, elsewhere); err != nil {
			return err
		}
	}
	a.undo.push(func(context.Context) error { return records.Remove(a.owner) })
	return records.Write(r)
}

// recordOf is what a configuration says that is to be kept.
func recordOf(c *Config) *record.Record {
	return &record.Record{
		Attachment: c.Attachment,
		Aliases:    c.Aliases,
		CgroupPath: c.CgroupPath,
		Labels:     c.Labels,
		Uplinks:    c.Uplinks,
		Bandwidth:  c.Bandwidth,
	}
}

func (a *addition) tune(context.Context) error {
	tuning := a.config.Tuning
	if tuning.IsEmpty() {
		return nil
	}
	if a.config.PrevResult != nil {
		before, err := tuning.Present(a.container.ns, a.container.handle, a.pair.ContainerName)
		if err != nil {
			return err
		}
		a.undo.push(func(context.Context) error {
			return before.Apply(a.container.ns, a.container.handle, a.pair.ContainerName)
		})
	}
	return tuning.Apply(a.container.ns, a.container.handle, a.pair.ContainerName)
}

// restore gives back what a chained ebpfnet has changed of an interface that
// stays another plugin's. Where the container is gone, so is what was changed.
func restore(r *record.Record, netns string) error {
	if r == nil || r.Chained == nil || r.Chained.Before.IsEmpty() || netns == "" {
		return nil
	}
	container, err := openContainer(netns)
	if err != nil {
		return nil
	}
	defer container.close()

	device, err := link.Find(container.handle, r.Attachment.IfName)
	if err != nil || device == nil {
		return err
	}
	return r.Chained.Before.Apply(container.ns, container.handle, r.Attachment.IfName)
}
