package main

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// target is a bound for a median ratio.
type target struct {
	title   string
	against string
	bound   float64
	atMost  bool // the ratio must not exceed the bound; otherwise it must reach it
	// measure returns nil if the run did not measure it.
	measure func(r *result, ours setupResult) []measured
}

// measured is one ratio of a target.
type measured struct {
	What string `json:"what"`
	spread
}

// verdict says whether a setup meets a target.
type verdict struct {
	Title    string     `json:"title"`
	Against  string     `json:"against"`
	Target   float64    `json:"target"`
	AtMost   bool       `json:"at_most,omitempty"`
	Setup    string     `json:"setup"`
	Measured []measured `json:"measured"`
	Met      bool       `json:"met"`
}

// trafficTargets are the bounds for traffic.
var trafficTargets = []struct {
	path, workload, against string
	bound                   float64
}{
	{"pod-pod", "udp-packets", bareName, 0.95},
	{"pod-pod", "tcp-rr", bareName, 0.95},
	{"pod-pod", "tcp-crr", bareName, 0.95},
	{"pod-pod", "tcp-stream", bareName, 2.5},
	{"pod-outside", "udp-packets", plainName, 1},
	{"pod-outside", "tcp-rr", plainName, 1},
	{"outside-port", "udp-packets", plainName, 1},
	{"outside-port", "tcp-rr", plainName, 1},
}

// targets are the project's, in the order of the table.
func targets() []target {
	var all []target
	for _, t := range trafficTargets {
		all = append(all, trafficTarget(t.path, t.workload, t.against, t.bound))
	}
	return append(all,
		scaleTarget(scale{Ports: 5000, Pods: 1000}, 0.98),
		target{title: "ADD, speed-up", against: variantTitle(bridgeName), bound: 10, measure: addTime},
		target{title: "ADDs per second, 16 concurrent", against: variantTitle(bridgeName), bound: 8, measure: addsAtOnce},
		target{title: "DEL, time", against: "removal of a bare veth", bound: 1.3, atMost: true, measure: delTime},
	)
}

func trafficTarget(path, workload, against string, bound float64) target {
	return target{
		title: pathTitle(path) + ", " + workloadTitle(workload), against: variantTitle(against), bound: bound,
		measure: func(r *result, ours setupResult) []measured {
			var all []measured
			for _, f := range testenv.Families {
				all = appendMeasured(all, f.Name, ratios(r.rates(ours.Name, path, f.Name, workload), r.rates(against, path, f.Name, workload)))
			}
			return all
		},
	}
}

// scaleTarget compares a variant with itself at the smallest scale; the worst ratio counts.
func scaleTarget(large scale, bound float64) target {
	return target{
		title: "worst of the above with " + large.String(), against: "the same with 1 of each", bound: bound,
		measure: func(r *result, ours setupResult) []measured {
			all := scaleRatios(r, ours, large)
			if len(all) == 0 {
				return nil
			}
			return []measured{slices.MinFunc(all, func(a, b measured) int { return cmp.Compare(a.Median, b.Median) })}
		},
	}
}

// scaleRatios compares a variant at a scale with itself at the smallest, for all traffic with a
// target.
func scaleRatios(r *result, ours setupResult, large scale) []measured {
	var all []measured
	scaled := scaledName(ours.Variant, large)
	for _, t := range trafficTargets {
		for _, f := range testenv.Families {
			what := fmt.Sprintf("%s, %s, %s", pathTitle(t.path), workloadTitle(t.workload), f.Name)
			all = appendMeasured(all, what, ratios(r.rates(scaled, t.path, f.Name, t.workload), r.rates(ours.Name, t.path, f.Name, t.workload)))
		}
	}
	return all
}

func addTime(r *result, ours setupResult) []measured {
	return appendMeasured(nil, "", ratios(r.calls(bridgeName, "ADD").Sequential, r.calls(ours.Name, "ADD").Sequential))
}

func addsAtOnce(r *result, ours setupResult) []measured {
	return appendMeasured(nil, "", ratios(r.calls(ours.Name, "ADD").Concurrent, r.calls(bridgeName, "ADD").Concurrent))
}

func delTime(r *result, ours setupResult) []measured {
	return appendMeasured(nil, "", ratios(r.calls(ours.Name, "DEL").Sequential, r.calls(bareName, "DEL").Sequential))
}

func appendMeasured(all []measured, what string, ratios []float64) []measured {
	if len(ratios) == 0 {
		return all
	}
	return append(all, measured{what, spreadOf(ratios)})
}

// evaluate compares every variant of ebpfnet with the targets, except the one without fast path.
func (r *result) evaluate() {
	for _, t := range targets() {
		for _, s := range r.present() {
			if !s.Ours || s.Variant == neverName {
				continue
			}
			v := verdict{Title: t.title, Against: t.against, Target: t.bound, AtMost: t.atMost, Setup: s.Name, Measured: t.measure(r, s)}
			v.Met = len(v.Measured) > 0 && !slices.ContainsFunc(v.Measured, func(m measured) bool { return v.misses(m) })
			r.Targets = append(r.Targets, v)
		}
	}
}

// forgetUnmeasured removes the targets that a part of a run says nothing about.
func (r *result) forgetUnmeasured() {
	seen := make(map[string]bool)
	for _, v := range r.Targets {
		seen[v.Title] = seen[v.Title] || len(v.Measured) > 0
	}
	r.Targets = slices.DeleteFunc(r.Targets, func(v verdict) bool { return !seen[v.Title] })
}

func (v verdict) misses(m measured) bool {
	if v.AtMost {
		return m.Median > v.Target
	}
	return m.Median < v.Target
}
