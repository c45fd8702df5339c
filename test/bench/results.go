package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// report returns RESULTS.md.
func (r *result) report() string {
	return fmt.Sprintf("# Results of the benchmark\n\n"+
		"`make bench` writes this file. [README.md](README.md) explains the tables.\n\n"+
		"ebpfnet with `fastPath` established, as a multiple of the reference plugins (IPv4):\n\n%s\n"+
		"With `fastPath` auto, the default:\n\n%s\n"+
		"With `fastPath` always:\n\n%s\n"+
		"Between nodes, as a multiple of the alternatives (IPv4):\n\n%s\n"+
		"Beside kube-proxy's tables, and a stateful firewall (IPv4):\n\n%s\n"+
		"Targets of the project:\n\n%s\n"+
		"Rates among many containers, host ports, flows and new connections, as a multiple of those with one of each:\n\n"+
		"%s\n%s\n%s\n",
		r.referenceTable(establishedName), r.referenceTable(autoName), r.referenceTable(alwaysName),
		r.comparisonTable(betweenNodes, true), r.comparisonTable(besideRules(), false), r.targetTable(), r.scaleTable(), r.unitTable(), r.conditions())
}

// referenceTable has a row for each kind of traffic and for ADD and DEL of a setup of ours, and a column for each
// combination of reference plugins. More is better everywhere.
func (r *result) referenceTable(ours string) *table {
	var references []string
	titles := []string{"workload"}
	for _, v := range variants {
		if s, ok := r.setup(v.name); ok && v.reference && s.Absent == "" {
			references = append(references, v.name)
			titles = append(titles, v.title)
		}
	}
	t := new(table)
	t.add(titles...)
	row := func(title string, ratiosTo func(reference string) []float64) {
		cells := []string{title}
		for _, reference := range references {
			cells = append(cells, cellOf(ratiosTo(reference)))
		}
		t.add(cells...)
	}
	for _, line := range rows() {
		if line.path == podNode || isService(line.path) {
			continue
		}
		row(line.title(), func(reference string) []float64 {
			return r.ratios(line, ours, reference, testenv.IPv4.Name)
		})
	}
	for _, verb := range verbs {
		row(verb+", speed-up", func(reference string) []float64 {
			return ratios(r.calls(reference, verb).Sequential, r.calls(ours, verb).Sequential)
		})
	}
	return t
}

// cellOf returns the text of a cell, which is empty if nothing was measured.
func cellOf(ratios []float64) string {
	if len(ratios) == 0 {
		return ""
	}
	return spreadOf(ratios).String()
}

// targetTable has a row for each target and a column for each variant of ebpfnet.
func (r *result) targetTable() *table {
	t := new(table)
	var ours []setupResult
	titles := []string{"workload", "compared with", "target"}
	for _, v := range r.Targets {
		if s, ok := r.setup(v.Setup); ok && v.Title == r.Targets[0].Title && v.Against == r.Targets[0].Against {
			ours = append(ours, s)
			titles = append(titles, s.Title)
		}
	}
	t.add(titles...)
	for i := 0; len(ours) > 0 && i < len(r.Targets); i += len(ours) {
		v := r.Targets[i]
		cells := []string{v.Title, v.Against, boundsOf(r.Targets[i : i+len(ours)])}
		for _, v := range r.Targets[i : i+len(ours)] {
			cells = append(cells, v.String())
		}
		t.add(cells...)
	}
	return t
}

// boundsOf is the bound of a target, or the bounds of the columns.
func boundsOf(verdicts []verdict) string {
	var bounds []string
	for _, v := range verdicts {
		bounds = append(bounds, ratio(v.Target))
	}
	if one := slices.Compact(slices.Clone(bounds)); len(one) == 1 {
		bounds = one
	}
	text := "at least " + strings.Join(bounds, ", ")
	if verdicts[0].AtMost {
		text = "at most " + ratio(verdicts[0].Target)
	}
	return text
}

// String returns a cell of the table.
func (v verdict) String() string {
	var parts []string
	for _, m := range v.Measured {
		parts = append(parts, strings.TrimSpace(m.spread.String()+" "+m.What))
	}
	switch {
	case len(parts) == 0:
		return "not measured"
	case v.Met:
		return strings.Join(parts, ", ") + ": met"
	case v.AtMost:
		return strings.Join(parts, ", ") + ": above target"
	}
	return strings.Join(parts, ", ") + ": below target"
}
