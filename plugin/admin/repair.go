package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// Repair attaches programs that are missing from devices, and reconciles the datapath with changes of
// the host. It returns a description of each repair. ADDs and DELs may run at the same time.
func (o *Host) Repair(ctx context.Context) (repaired []string, err error) {
	detached, err := o.detachedUplinks()
	if err != nil {
		return nil, err
	}
	before, err := o.datapath.LoopbackAttached()
	if err != nil {
		return nil, err
	}
	reconciled, err := o.Follow(ctx)
	if err != nil {
		return nil, err
	}
	attached, err := o.attachAll(ctx)
	for _, uplink := range detached {
		if has, err := o.datapath.UplinkAttached(uplink.Attrs().Index); err == nil && has {
			repaired = append(repaired, uplinkPrograms(uplink))
		}
	}
	repaired = append(repaired, reconciled...)
	if after, err := o.datapath.LoopbackAttached(); err == nil && after && !before {
		repaired = append(repaired, "program of the loopback device")
	}
	returned, errReturned := o.returnForIPsec(ctx)
	return slices.Concat(repaired, attached, returned), errors.Join(err, errReturned)
}

// returnForIPsec has offloaded connections pass the stack again if the host has IPsec policies: they may be newer.
func (o *Host) returnForIPsec(ctx context.Context) (repaired []string, err error) {
	hooks, err := o.datapath.StackHooks(loopback, false)
	if err != nil || hooks&bpf.HookIPsec == 0 {
		return nil, err
	}
	number, err := returnOffloaded(ctx, o.datapath, func(maps.Endpoint) bool { return true })
	if err = mayEnd(offloadedOnes, err); number == 0 {
		return nil, err
	}
	repaired = []string{fmt.Sprintf("%d TCP connections, which pass the stack's IPsec policies again", number)}
	return repaired, errors.Join(err, maps.With(ctx, o.datapath, (*maps.Store).VoidOffloads)) // rather ended than in clear text
}

// detachedUplinks returns the uplinks that lack programs. A port of a bridge or bond needs none.
func (o *Host) detachedUplinks() (detached []netlink.Link, err error) {
	uplinks, err := o.Uplinks()
	if err != nil {
		return nil, err
	}
	for _, uplink := range uplinks {
		attached, err := o.datapath.UplinkAttached(uplink.Attrs().Index)
		if err != nil {
			return nil, err
		}
		if !attached && !link.IsPort(uplink) {
			detached = append(detached, uplink)
		}
	}
	return detached, nil
}

func uplinkPrograms(uplink netlink.Link) string { return "programs of uplink " + uplink.Attrs().Name }

// attachUplinks attaches the programs of known uplinks where they are missing: Follow does so only for uplinks that networks
// with living containers select. The caller holds the lock, so that no uplink becomes a bridge of containers meanwhile.
func (o *Host) attachUplinks() error {
	detached, err := o.detachedUplinks()
	for _, uplink := range detached {
		header, ok := link.HeaderOf(uplink)
		if !ok {
			continue
		}
		errAttach := o.datapath.AttachUplink(uplink.Attrs().Index, header)
		if !errors.Is(errAttach, unix.ENODEV) && !errors.Is(errAttach, unix.ENOLINK) { // else it was deleted meanwhile
			err = errors.Join(err, errAttach)
		}
	}
	return err
}

// attachAll attaches the programs of uplinks and containers where they are missing, and describes those of containers.
func (o *Host) attachAll(ctx context.Context) (repaired []string, err error) {
	err = maps.With(ctx, o.datapath, func(store *maps.Store) error {
		store.NewGeneration() // cached decisions do not outlive a repair
		if err := o.attachUplinks(); err != nil {
			return err
		}
		for _, end := range o.ends {
			attached, err := o.datapath.EndpointAttached(end.index)
			if err != nil {
				return err
			}
			if attached {
				continue
			}
			attach := o.datapath.AttachEndpoint
			if end.isChained {
				attach = o.datapath.AttachLiveEndpoint
			}
			err = attach(end.index)
			if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOLINK) {
				continue // the container has ended meanwhile
			}
			if err != nil {
				return err
			}
			repaired = append(repaired, fmt.Sprintf("program of %s (%s)", end.name, end.title))
		}
		return nil
	})
	return repaired, err
}

// Follow does for all networks of the host what STATUS does for one, and describes the changes. It only
// reads if nothing has changed.
func (o *Host) Follow(ctx context.Context) (repaired []string, err error) {
	off, err := link.ForwardingIsOff(true, true)
	if err != nil {
		return nil, err
	}
	before, err := o.Uplinks()
	if err != nil {
		return nil, err
	}
	choices := o.uplinkPatterns()
	rules, err := maps.ReadRouteRules(o.datapath)
	if err != nil {
		return nil, err
	}
	for _, patterns := range choices {
		if err := refresh.Host(ctx, o.datapath, patterns); err != nil {
			return nil, err
		}
	}
	after, err := o.Uplinks()
	if err != nil {
		return nil, err
	}
	for _, uplink := range after {
		isSame := func(u netlink.Link) bool { return u.Attrs().Index == uplink.Attrs().Index }
		if !slices.ContainsFunc(before, isSame) {
			repaired = append(repaired, "programs of the new uplink "+uplink.Attrs().Name)
		}
	}
	if now, err := maps.ReadRouteRules(o.datapath); err == nil && now != rules {
		repaired = append(repaired, "what fastPath always and auto leave to the host's policy rules")
	}
	stillOff, err := link.ForwardingIsOff(true, true)
	for _, name := range off {
		if err == nil && !slices.Contains(stillOff, name) {
			repaired = append(repaired, "forwarding, by "+name)
		}
	}
	return repaired, err
}

// uplinkPatterns returns the different values of the uplinks key of the networks that have living containers.
func (o *Host) uplinkPatterns() map[string][]string {
	choices := map[string][]string{}
	for owner := range o.ends {
		rec, err := o.records.Read(owner)
		if err != nil {
			continue // unreadable
		}
		var patterns []string
		if rec != nil {
			patterns = rec.Uplinks
		}
		choices[strings.Join(patterns, " ")] = patterns
	}
	return choices
}

// Detached describes the devices of containers and of the host that lack programs. Repair attaches them.
func (o *Host) Detached() (containers, host []string, err error) {
	for _, end := range o.ends {
		attached, errEnd := o.datapath.EndpointAttached(end.index)
		if err = errors.Join(err, errEnd); errEnd == nil && !attached {
			containers = append(containers, fmt.Sprintf("%s (%s)", end.name, end.title))
		}
	}
	slices.Sort(containers)
	uplinks, errUplinks := o.detachedUplinks()
	for _, uplink := range uplinks {
		host = append(host, uplinkPrograms(uplink))
	}
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
	choices := o.uplinkPatterns()
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
