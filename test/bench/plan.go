package main

import (
	"os"
	"slices"
	"strings"
	"time"
)

// plan says how much to measure.
type plan struct {
	name string
	// without names variants to leave out.
	without []string
	// withoutRules leaves out the variants with firewall rules.
	withoutRules bool
	// withoutNamed leaves out the variants that must be named.
	withoutNamed bool
	// scales are those of the variants that show what scale costs, beside the smallest.
	scales []scale
	// onlyScales leaves out all other setups.
	onlyScales bool
	// uplinked names variants to measure by every kind of uplink.
	uplinked []string
	rounds   int
	// slice is the time for each workload, path, family and setup in each round.
	slice time.Duration
	// calls is the number of sequential ADDs and DELs in each round.
	calls int
	// slowCalls measures the ADDs that take seconds, too.
	slowCalls bool
}

var (
	full = plan{
		name: "bench", scales: append(allScales(), crowded),
		uplinked: []string{plainName, bridgeName, ptpName, establishedName, alwaysName, autoName, routesName, flannelName, directName, tunnelName},
		rounds:   7, slice: 80 * time.Millisecond, calls: 10, slowCalls: true, withoutNamed: true,
	}
	quick = plan{
		name: "bench-quick", scales: []scale{crowded}, without: []string{"bridge-nftables", "ptp-nftables", neverName, directAutoName},
		uplinked: []string{plainName, bridgeName, establishedName, routesName, directName, tunnelName},
		rounds:   5, slice: 30 * time.Millisecond, calls: 3, withoutRules: true,
	}
)

// setups lists the variants and scales to set up.
func (p plan) setups() []plannedSetup {
	var all, loads []plannedSetup // loads share the setups before them
	for _, v := range variants {
		if slices.Contains(p.without, v.name) || (v.rules != nil || v.policy) && p.withoutRules ||
			v.named && p.withoutNamed || p.onlyScales && !v.scaled() {
			continue
		}
		for _, u := range uplinks {
			if u.isDefault() || !p.onlyScales && slices.Contains(p.uplinked, v.name) {
				all = append(all, plannedSetup{v, u, smallest})
			}
		}
		for _, s := range p.scales {
			switch p := (plannedSetup{v, uplinks[0], s}); {
			case v.scaled() && s.isLoad():
				loads = append(loads, p)
			case v.scaled() && v.ours:
				all = append(all, p)
			}
		}
	}
	return append(all, loads...)
}

// callsOf returns the number of calls, which is smaller for setups whose ADD takes seconds.
func (p plan) callsOf(s *setup) int {
	if s.slow {
		return min(2, p.calls)
	}
	return p.calls
}

// plan returns the plan with the changes that the options make.
func (o *options) plan() plan {
	p := full
	if o.quick {
		p = quick
	}
	switch {
	case o.scale:
		p.scales, p.onlyScales = append(allScales(), crowded), true
	case o.narrow():
		p.scales = nil
	}
	if len(o.variants) > 0 { // each that is named
		p.without, p.withoutRules, p.withoutNamed = nil, false, false
	}
	if o.rounds > 0 {
		p.rounds = o.rounds
	}
	if o.slice > 0 {
		p.slice = o.slice
	}
	return p
}

// command returns the command that measures the same.
func (o *options) command() string {
	if o.partial() {
		return "bench " + strings.Join(os.Args[1:], " ")
	}
	return "make " + o.plan().name
}

type plannedSetup struct {
	variant
	uplink
	scale
}

func (p plannedSetup) name() string { return setupName(p.variant.name, p.uplink.name, p.scale) }

// isMain reports whether this is the variant's setup for comparisons with others.
func (p plannedSetup) isMain() bool { return p.uplink.isDefault() && p.scale == smallest }

// measures reports whether traffic is measured on a setup.
func (p plannedSetup) measures(t traffic) bool {
	switch {
	case !p.hasPath(t.path.name):
		return false
	case p.streams:
		return t.workload.name == streamName
	case !p.uplink.isDefault():
		return t.workload.name == streamName && t.path.name != podPod
	}
	return p.scale == smallest || p.scale.measures(t)
}

// hasAttachments reports whether ADD and DEL of a setup compare with those of others.
func (p plannedSetup) hasAttachments() bool {
	return p.isMain() && !p.routed && !p.streams && !p.redirect && p.join == nil && p.rules == nil
}
