package admin

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// Detached describes the devices of containers and of the host that lack programs. Repair attaches them.
func (o *Host) Detached() (containers, host []string, err error) {
	for _, end := range o.ends {
		attached, errEnd := o.datapath.EndpointAttached(end.index)
		if err = errors.Join(err, errEnd); errEnd == nil && !attached {
			containers = append(containers, fmt.Sprintf("%s (%s)", end.name, end.title))
		}
	}
	slices.Sort(containers)
	host, errUplinks := o.detachedUplinks()
	hasLoopback, errLoopback := o.datapath.LoopbackAttached()
	ports, errPorts := maps.HostPorts(o.datapath)
	if len(ports) > 0 && errLoopback == nil && !hasLoopback {
		host = append(host, "program of the loopback device")
	}
	return containers, host, errors.Join(err, errUplinks, errLoopback, errPorts)
}

// NewUplinks returns the uplinks of the containers' networks that have no programs yet: an uplinks key selects
// them, or they have an address. Repair attaches them.
func (o *Host) NewUplinks() (names []string, err error) {
	known, err := maps.Uplinks(o.datapath)
	if err != nil {
		return nil, err
	}
	devices, err := link.List(o.host)
	if err != nil {
		return nil, err
	}
	choices, err := o.uplinkPatterns()
	if err != nil {
		return nil, err
	}
	for _, patterns := range choices {
		found, err := link.Uplinks(o.host, devices, refresh.Matcher(patterns))
		if err != nil {
			return nil, err
		}
		for _, device := range devices {
			isKnown := func(u maps.Uplink) bool { return u.IfIndex == device.Attrs().Index }
			isFound := func(u link.Uplink) bool {
				return u.Index == device.Attrs().Index && (patterns != nil || u.Addr4.IsValid() || u.Addr6.IsValid())
			}
			_, hasPrograms := link.HeaderOf(device)
			if hasPrograms && slices.ContainsFunc(found, isFound) && !slices.ContainsFunc(known, isKnown) {
				names = append(names, device.Attrs().Name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// ProgramsBeforeUplink returns the programs of other tools that receive an uplink's packets before ours.
func (o *Host) ProgramsBeforeUplink(uplink netlink.Link) ([]string, error) {
	return programsBefore(o.host, uplink.Attrs().Index, true, bpf.ProgFromUplink, bpf.ProgFromUplinkL3)
}
