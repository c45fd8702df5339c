package main

import (
	"cmp"
	"slices"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// target is a bound for a median ratio.
type target struct {
	title   string
	against string
	bound   float64
	bounds  map[string]float64 // of variants for which it differs
	atMost  bool               // the ratio must not exceed the bound; otherwise it must reach it
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

// trafficTarget is a bound for a row, as a ratio to a variant.
type trafficTarget struct {
	row
	against string
	bound   float64
	bounds  map[string]float64 // as in target
}

// shortRows are those of short connections.
var shortRows = []row{
	{podPod, "tcp-crr", ""}, {"pod-outside", "tcp-crr", ""}, {"pod-outside", "udp-dns", ""}, {"outside-port", "tcp-crr", ""}, {"outside-port", "udp-dns", ""},
}

// shortBesidePlain are the bounds for short connections beside plain routing.
var shortBesidePlain = map[string]float64{autoName: 0.91}

// trafficTargets are the bounds for traffic: between pods the cost of a veth or of a minimal program,
// elsewhere the cost of the host's stack.
var trafficTargets = []trafficTarget{
	{row{podPod, "tcp-crr", ""}, bareName, 0.88, map[string]float64{alwaysName: 0.92, autoName: 0.93}},
	{row{podPod, "udp-packets", ""}, redirectName, 0.97, nil},
	{row{podPod, "tcp-rr", ""}, redirectName, 0.97, nil},
	{row{podPod, streamName, ""}, bareName, 0.97, nil},
	{row{"pod-outside", "tcp-crr", ""}, plainName, 1, shortBesidePlain},
	{row{"pod-outside", "udp-dns", ""}, plainName, 1, shortBesidePlain},
	{row{"pod-outside", streamName, ""}, plainName, 1, nil},
	{row{"pod-outside", streamName, bigUplink}, plainName, 1, nil},
	{row{"pod-outside", streamName, "frames"}, plainName, 1, nil},
	{row{"outside-port", "tcp-crr", ""}, plainName, 1, shortBesidePlain},
	{row{"outside-port", "udp-dns", ""}, plainName, 1, shortBesidePlain},
	{row{"outside-port", streamName, ""}, plainName, 1, nil},
	{row{"outside-port", streamName, bigUplink}, plainName, 1, nil},
	{row{"outside-port", streamName, "frames"}, plainName, 1, nil},
}

// targets are the project's, in the order of the table.
func targets() []target {
	var all []target
	for _, v := range variants {
		if v.reference {
			all = append(all, everyRowTarget(v))
		}
	}
	for _, peer := range []string{ptpName, bridgeName} {
		all = append(all, shortTarget(peer))
	}
	for _, t := range trafficTargets {
		all = append(all, t.target())
	}
	for _, c := range append(slices.Clone(betweenNodes), besideRules()...) {
		all = append(all, c.target())
	}
	return append(all,
		bigStreamTarget(0.97),
		scaleTarget(crowded, 0.97),
		target{title: "ADD, speed-up", against: variantTitle(bridgeName), bound: 10, measure: addTime},
		target{title: "ADDs per second, 16 concurrent", against: variantTitle(bridgeName), bound: 8, measure: addsAtOnce},
		target{title: "DEL, time", against: "removal of a bare veth", bound: 1.3, atMost: true, measure: delTime},
	)
}

func (t trafficTarget) target() target {
	return target{
		title: t.title(), against: variantTitle(t.against), bound: t.bound, bounds: t.bounds,
		measure: func(r *result, ours setupResult) []measured {
			var all []measured
			for _, f := range testenv.Families {
				all = appendMeasured(all, f.Name, r.ratios(t.row, ours.Variant, t.against, f.Name))
			}
			return all
		},
	}
}

// bigStreamTarget is about BIG TCP, which makes a difference for streams alone.
func bigStreamTarget(bound float64) target {
	stream := row{podPod, streamName, ""}
	return target{
		title: stream.title() + ", BIG TCP sizes", against: variantTitle(bareBigName), bound: bound,
		measure: func(r *result, ours setupResult) []measured {
			var all []measured
			for _, f := range testenv.Families {
				if ours.Variant == establishedName {
					all = appendMeasured(all, f.Name, r.ratios(stream, ourBigName, bareBigName, f.Name))
				}
			}
			return all
		},
	}
}

// everyRowTarget says that nothing may be slower than with a reference plugin; the worst ratio counts.
func everyRowTarget(reference variant) target {
	return target{
		title: "worst of all rows", against: reference.title, bound: 1,
		measure: func(r *result, ours setupResult) []measured {
			return worstRatio(r, rows(), ours.Variant, reference.name)
		},
	}
}

// shortTarget is for short connections on one host, which bypass the stack under fastPath always and auto; the worst ratio counts.
func shortTarget(peer string) target {
	return target{
		title: "worst of short connections", against: variantTitle(peer), bound: 1, bounds: map[string]float64{alwaysName: 1.05, autoName: 1.05},
		measure: func(r *result, ours setupResult) []measured { return worstRatio(r, shortRows, ours.Variant, peer) },
	}
}

// worstRatio returns the smallest ratio of a variant to another one in some rows, nil if there is none.
func worstRatio(r *result, rows []row, variant, against string) []measured {
	var all []measured
	for _, row := range rows {
		for _, f := range testenv.Families {
			all = appendMeasured(all, row.title()+", "+f.Name, r.ratios(row, variant, against, f.Name))
		}
	}
	return worst(all)
}

// worst returns the smallest ratio, nil of none.
func worst(all []measured) []measured {
	if len(all) == 0 {
		return nil
	}
	return []measured{slices.MinFunc(all, func(a, b measured) int { return cmp.Compare(a.Median, b.Median) })}
}

// scaleTarget compares a variant with itself at the smallest scale; the worst ratio counts.
func scaleTarget(large scale, bound float64) target {
	return target{
		title: "worst of these with " + large.String(), against: "the same with one of each", bound: bound,
		measure: func(r *result, ours setupResult) []measured {
			return worst(scaleRatios(r, ours, large))
		},
	}
}

// scaleRatios compares a variant at a scale with itself at the smallest, for all measured traffic.
func scaleRatios(r *result, ours setupResult, large scale) []measured {
	var all []measured
	scaled := setupName(ours.Variant, "", large)
	for _, row := range rows() {
		if row.uplink != "" {
			continue
		}
		for _, f := range testenv.Families {
			all = appendMeasured(all, row.title()+", "+f.Name, ratios(r.rates(scaled, row.path, f.Name, row.workload), r.ratesOf(row, ours.Variant, f.Name)))
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

func (t target) boundFor(variant string) float64 {
	return cmp.Or(t.bounds[variant], t.bound)
}

// evaluate compares the judged variants with the targets.
func (r *result) evaluate() {
	for _, t := range targets() {
		for _, s := range r.present() {
			if !slices.Contains(judged, s.Variant) {
				continue
			}
			v := verdict{Title: t.title, Against: t.against, Target: t.boundFor(s.Variant), AtMost: t.atMost, Setup: s.Name, Measured: t.measure(r, s)}
			v.Met = len(v.Measured) > 0 && !slices.ContainsFunc(v.Measured, func(m measured) bool { return v.misses(m) })
			r.Targets = append(r.Targets, v)
		}
	}
}

// forgetUnmeasured removes the targets that a partial run did not measure.
func (r *result) forgetUnmeasured() {
	seen := make(map[string]bool)
	for _, v := range r.Targets {
		seen[v.Title+v.Against] = seen[v.Title+v.Against] || len(v.Measured) > 0
	}
	r.Targets = slices.DeleteFunc(r.Targets, func(v verdict) bool { return !seen[v.Title+v.Against] })
}

func (v verdict) misses(m measured) bool {
	if v.AtMost {
		return m.Median > v.Target
	}
	return m.Median < v.Target
}
