package main

import (
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// scaleTable has the median of all paths and families for each workload, and the worst one.
func (r *result) scaleTable() *table {
	t := new(table)
	titles := []string{"", ""}
	for _, workload := range scaledWorkloads {
		titles = append(titles, workloadTitle(workload))
	}
	t.add(append(titles, "worst", "of")...)
	for _, s := range r.Setups {
		small, ok := r.setup(s.Variant)
		if !ok || s.scale == smallest {
			continue
		}
		cells := []string{s.Title, s.scale.String()}
		for _, workload := range scaledWorkloads {
			cell := ""
			if rates := r.relativeRates(s.Variant, s.scale, workload); len(rates) > 0 {
				cell = spreadOf(rates).String()
			}
			cells = append(cells, cell)
		}
		for _, m := range worst(scaleRatios(r, small, s.scale)) {
			t.add(append(cells, m.spread.String(), m.What)...)
		}
	}
	return t
}

// unitTable has the memory of one more object of a kind: the share of preallocated maps, and the growth of
// the others.
func (r *result) unitTable() *table {
	t := new(table)
	t.add("", "bytes")
	main, ok := r.setup(establishedName)
	if !ok || main.Objects == nil {
		return t
	}
	if flows := main.Objects.find("flow_table"); flows.Entries > 0 {
		buckets := main.Objects.find("flow_buckets")
		t.add("flow", testenv.Thousands(int((flows.Bytes+buckets.Bytes)/uint64(flows.Entries))))
	}
	for _, d := range dimensions[:2] {
		largest := d.sizes[len(d.sizes)-1]
		grown, ok := r.setup(setupName(establishedName, "", d.at(largest)))
		if !ok || grown.Objects == nil {
			continue
		}
		before, after := main.Objects.bytes(), grown.Objects.bytes()
		t.add(strings.TrimSuffix(d.name, "s")+", IPv4 and IPv6", testenv.Thousands((int(after)-int(before))/(largest-*d.of(&smallest))))
	}
	return t
}

// relativeRates returns the ratios of all paths, families and rounds.
func (r *result) relativeRates(variant string, at scale, workload string) []float64 {
	var all []float64
	for _, p := range paths {
		for _, f := range testenv.Families {
			rates := r.rates(setupName(variant, "", at), p.name, f.Name, workload)
			all = append(all, ratios(rates, r.rates(variant, p.name, f.Name, workload))...)
		}
	}
	return all
}
