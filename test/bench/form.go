package main

import (
	"slices"
	"time"
)

// form is how much is measured.
type form struct {
	name string
	// without are variants that are left out.
	without []string
	// scales are those that ours are set up at beside the smallest, references those that others are.
	scales, references []scale
	rounds             int
	// slice is how long each traffic is measured in each round.
	slice time.Duration
	// calls are the ADDs and DELs of each round, one after the other; those at once are atOnceLimit.
	calls int
}

var (
	full = form{
		name:       "bench",
		scales:     []scale{{1000, 1}, {5000, 1}, {1, 100}, {1, 1000}, {5000, 1000}},
		references: []scale{{1000, 1}, {5000, 1}},
		rounds:     7, slice: 80 * time.Millisecond, calls: 10,
	}
	quick = form{
		name: "bench-quick", scales: []scale{{5000, 1}}, without: []string{"bridge-nftables", "ptp-iptables", "ptp-nftables"},
		rounds: 5, slice: 30 * time.Millisecond, calls: 3,
	}
)

// setups lists what the form sets up.
func (f form) setups() []plannedSetup {
	var all []plannedSetup
	for _, v := range variants {
		if slices.Contains(f.without, v.name) {
			continue
		}
		all = append(all, plannedSetup{v, smallest})
		switch {
		case v.ours && v.name != neverName:
			all = append(all, planned(v, f.scales)...)
		case v.reference && !v.slow:
			all = append(all, planned(v, f.references)...)
		}
	}
	return all
}

// callsOf is fewer calls of those that take seconds.
func (f form) callsOf(s *setup) int {
	if s.slow {
		return min(2, f.calls)
	}
	return f.calls
}

type plannedSetup struct {
	variant
	scale
}

func planned(v variant, scales []scale) []plannedSetup {
	var all []plannedSetup
	for _, s := range scales {
		all = append(all, plannedSetup{v, s})
	}
	return all
}
