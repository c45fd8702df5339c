package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/reconcile"
)

// Repair attaches programs that are missing from devices, and reconciles the datapath with changes of
// the host. It returns a description of each repair. ADDs and DELs may run at the same time.
func (o *Operator) Repair(ctx context.Context) (repaired []string, err error) {
	detached, err := o.detachedUplinks()
	if err != nil {
		return nil, err
	}
	before, err := o.datapath.LoopbackAttached()
	if err != nil {
		return nil, err
	}
	reconciled, errFollow := o.Follow(ctx)
	if errFollow != nil && !errors.Is(errFollow, reconcile.ErrSizes) {
		return nil, errFollow
	}
	repaired = append(detached, reconciled...)
	if after, err := o.datapath.LoopbackAttached(); err == nil && after && !before {
		repaired = append(repaired, "program of the loopback device")
	}
	attached, err := o.attachEndpoints(ctx)
	return append(repaired, attached...), errors.Join(errFollow, err)
}

// detachedUplinks describes the uplinks that lack programs, which Follow attaches.
func (o *Operator) detachedUplinks() (detached []string, err error) {
	uplinks, err := o.uplinks()
	if err != nil {
		return nil, err
	}
	for _, uplink := range uplinks {
		attached, err := o.datapath.UplinkAttached(uplink.Attrs().Index)
		if err != nil {
			return nil, err
		}
		if !attached {
			detached = append(detached, "programs of uplink "+uplink.Attrs().Name)
		}
	}
	return detached, nil
}

// attachEndpoints attaches the programs of containers where they are missing.
func (o *Operator) attachEndpoints(ctx context.Context) (repaired []string, err error) {
	err = maps.With(ctx, o.datapath, func(store *maps.Store) error {
		store.NewGeneration() // whatever is wrong, no decision outlives a repair
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
			if err := attach(end.index); err != nil {
				return err
			}
			repaired = append(repaired, fmt.Sprintf("program of %s (%s)", end.name, end.title))
		}
		return nil
	})
	return repaired, err
}

// Follow does for all networks of the host what a STATUS of each would do, and describes what is new.
// Without a change it only reads.
func (o *Operator) Follow(ctx context.Context) (repaired []string, err error) {
	off, err := link.ForwardingIsOff(true, true)
	if err != nil {
		return nil, err
	}
	before, err := o.uplinks()
	if err != nil {
		return nil, err
	}
	choices, err := o.wishes()
	if err != nil {
		return nil, err
	}
	rules, err := maps.ReadRouteRules(o.datapath)
	if err != nil {
		return nil, err
	}
	var errSizes error
	for _, wishes := range choices {
		resized, err := reconcile.Host(ctx, o.datapath, wishes)
		if repaired = append(repaired, resized...); errors.Is(err, reconcile.ErrSizes) {
			errSizes, err = err, nil
		}
		if err != nil {
			return repaired, err
		}
	}
	after, err := o.uplinks()
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
		repaired = append(repaired, "what fastPath always leaves to the host's policy rules")
	}
	stillOff, err := link.ForwardingIsOff(true, true)
	for _, name := range off {
		if err == nil && !slices.Contains(stillOff, name) {
			repaired = append(repaired, "forwarding, by "+name)
		}
	}
	return repaired, errors.Join(err, errSizes)
}

// wishes returns the different wishes of the networks that have living containers. If one wants the
// uplinks' sizes raised, all do, for none may lower what the next one raises.
func (o *Operator) wishes() (all []reconcile.Wishes, err error) {
	choices, raise := map[string][]string{}, false
	for owner := range o.ends {
		rec, err := o.records.Read(owner)
		if err != nil {
			return nil, err
		}
		var patterns []string
		if rec != nil {
			patterns, raise = rec.Uplinks, raise || rec.RaiseUplinks
		}
		choices[strings.Join(patterns, " ")] = patterns
	}
	for _, patterns := range choices {
		all = append(all, reconcile.Wishes{Patterns: patterns, Raise: raise})
	}
	return all, nil
}
