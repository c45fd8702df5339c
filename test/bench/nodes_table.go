package main

import (
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// comparison compares one of ebpfnet's modes between nodes, or ebpfnet beside firewall rules, with an alternative.
type comparison struct{ ours, against string }

var betweenNodes = []comparison{
	{directName, routesName},
	{directName, kindnetName},
	{directName, kindnetSlowName},
	{directAutoName, routesName},
	{directAutoName, kindnetName},
	{directAutoName, kindnetSlowName},
	{tunnelName, flannelName},
}

// target says that nothing may be slower, in the column of fastPath established.
func (c comparison) target() target {
	return target{
		title: "worst of all rows, " + variantTitle(c.ours), against: variantTitle(c.against), bound: 1,
		measure: func(r *result, ours setupResult) []measured {
			if ours.Variant != establishedName {
				return nil
			}
			return worstRatio(r, rows(), c.ours, c.against)
		},
	}
}

// comparisonTable has a row for each kind of traffic, between nodes or not, and a column for each comparison that the
// kernel allows.
func (r *result) comparisonTable(all []comparison, ofNodes bool) *table {
	titles := []string{"workload"}
	compared := slices.DeleteFunc(slices.Clone(all), func(c comparison) bool {
		against, ok := r.setup(c.against)
		return ok && against.Absent != ""
	})
	for _, c := range compared {
		titles = append(titles, variantTitle(c.ours)+" ÷ "+variantTitle(c.against))
	}
	t := new(table)
	t.add(titles...)
	for _, line := range rows() {
		if (line.path == podNode || line.path == nodeService) != ofNodes || !ofNodes && line.uplink != "" {
			continue
		}
		cells := []string{line.title()}
		for _, c := range compared {
			cells = append(cells, cellOf(r.ratios(line, c.ours, c.against, testenv.IPv4.Name)))
		}
		if strings.Join(cells[1:], "") != "" {
			t.add(cells...)
		}
	}
	return t
}
