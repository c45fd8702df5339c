package main

import (
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// scaledExample is a result in which everything makes 0.9 at each scale but the smallest.
func scaledExample() *result {
	r := &result{Kernel: "6.0"}
	add := func(variant string, s scale, rate float64, maps uint64) {
		name := setupName(variant, "", s)
		r.Setups = append(r.Setups, setupResult{
			Name: name, Variant: variant, Title: variantTitle(variant), scale: s,
			Objects: &objects{Maps: []object{{Name: "flows", Bytes: maps, Entries: 100}}},
		})
		for _, f := range testenv.Families {
			for _, w := range scaledWorkloads {
				r.Traffic = append(r.Traffic, trafficResult{Setup: name, Path: podPod, Family: f.Name, Workload: w, Rates: []float64{rate, rate}})
			}
		}
	}
	add(bareName, smallest, 1000, 0)
	add(establishedName, smallest, 1000, 20_000)
	for _, s := range allScales() {
		add(establishedName, s, 900, 20_000+400*uint64(s.Pods-1))
	}
	add(bareName, dimensions[3].at(100_000), 950, 0)
	return r
}

func TestScaleTables(t *testing.T) {
	r := scaledExample()
	for _, want := range []string{
		"| 10,000 containers                  | 0.90 (0.90–0.90)    |", "| both CPUs at once ", "| bare veth                     | 100,000 new connections per second | 0.95",
	} {
		if !strings.Contains(r.scaleTable().String(), want) {
			t.Errorf("no %q in\n%s", want, r.scaleTable())
		}
	}
	for _, want := range []string{"its copy | 200   |", "| container, IPv4 and IPv6                     | 400   |"} {
		if !strings.Contains(r.unitTable().String(), want) {
			t.Errorf("no %q in\n%s", want, r.unitTable())
		}
	}
}
