package main

import (
	"cmp"
	"fmt"
	"slices"
)

// target is a ratio that must come out of a run, in medians.
type target struct {
	title   string
	against string
	want    float64
	atMost  bool
	// measure returns nothing where the run did not measure it.
	measure func(r *result, ours setupResult) []measured
}

// measured is one ratio that a target is about.
type measured struct {
	What string `json:"what"`
	spread
}

// verdict says whether a variant reaches a target.
type verdict struct {
	Target   string     `json:"target"`
	Against  string     `json:"against"`
	Want     float64    `json:"want"`
	AtMost   bool       `json:"at_most,omitempty"`
	Setup    string     `json:"setup"`
	Measured []measured `json:"measured"`
	Reached  bool       `json:"reached"`
}

// trafficWanted is what the project asks of traffic.
var trafficWanted = []struct {
	path, work, against string
	want                float64
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

// targets are those of the project, in the order of its table.
func targets() []target {
	var all []target
	for _, t := range trafficWanted {
		all = append(all, trafficTarget(t.path, t.work, t.against, t.want))
	}
	return append(all,
		scaleTarget(scale{Ports: 5000, Pods: 1000}, 0.98),
		target{title: "ADD, times as fast", against: titleOf(bridgeName), want: 10, measure: addTime},
		target{title: "ADDs per second, 16 at a time", against: titleOf(bridgeName), want: 8, measure: addsAtOnce},
		target{title: "DEL, time", against: "removal of a bare veth", want: 1.3, atMost: true, measure: delTime},
	)
}

func trafficTarget(path, work, against string, want float64) target {
	return target{
		title: titleOfPath(path) + ", " + titleOfWork(work), against: titleOf(against), want: want,
		measure: func(r *result, ours setupResult) []measured {
			var all []measured
			for _, f := range families {
				all = appendMeasured(all, f.name, ratios(r.rates(ours.Name, path, f.name, work), r.rates(against, path, f.name, work)))
			}
			return all
		},
	}
}

// scaleTarget compares a variant with itself, and tells of the worst.
func scaleTarget(large scale, want float64) target {
	return target{
		title: "worst of these with " + large.String(), against: "the same with 1", want: want,
		measure: func(r *result, ours setupResult) []measured {
			all := scaleRatios(r, ours, large)
			if len(all) == 0 {
				return nil
			}
			return []measured{slices.MinFunc(all, func(a, b measured) int { return cmp.Compare(a.Median, b.Median) })}
		},
	}
}

// scaleRatios compares what a variant does at a scale with what it does at the smallest, in all
// that is wanted of traffic.
func scaleRatios(r *result, ours setupResult, large scale) []measured {
	var all []measured
	scaled := scaledName(ours.Variant, large)
	for _, t := range trafficWanted {
		for _, f := range families {
			what := fmt.Sprintf("%s, %s, %s", titleOfPath(t.path), titleOfWork(t.work), f.name)
			all = appendMeasured(all, what, ratios(r.rates(scaled, t.path, f.name, t.work), r.rates(ours.Name, t.path, f.name, t.work)))
		}
	}
	return all
}

func addTime(r *result, ours setupResult) []measured {
	return appendMeasured(nil, "", ratios(r.calls(bridgeName, "ADD").Alone, r.calls(ours.Name, "ADD").Alone))
}

func addsAtOnce(r *result, ours setupResult) []measured {
	return appendMeasured(nil, "", ratios(r.calls(ours.Name, "ADD").AtOnce, r.calls(bridgeName, "ADD").AtOnce))
}

func delTime(r *result, ours setupResult) []measured {
	return appendMeasured(nil, "", ratios(r.calls(ours.Name, "DEL").Alone, r.calls(bareName, "DEL").Alone))
}

func appendMeasured(all []measured, what string, ratios []float64) []measured {
	if len(ratios) == 0 {
		return all
	}
	return append(all, measured{what, spreadOf(ratios)})
}

// judge holds each of ours against the targets, but for the one that has no fast path.
func (r *result) judge() {
	for _, t := range targets() {
		for _, s := range r.present() {
			if !s.Ours || s.Variant == neverName {
				continue
			}
			v := verdict{Target: t.title, Against: t.against, Want: t.want, AtMost: t.atMost, Setup: s.Name, Measured: t.measure(r, s)}
			v.Reached = len(v.Measured) > 0 && !slices.ContainsFunc(v.Measured, func(m measured) bool { return v.misses(m) })
			r.Targets = append(r.Targets, v)
		}
	}
}

func (v verdict) misses(m measured) bool {
	if v.AtMost {
		return m.Median > v.Want
	}
	return m.Median < v.Want
}
