package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// scale is the number of objects and the load on a node beside the measured ones.
type scale struct {
	Pods  int `json:"pods"`
	Ports int `json:"ports"` // each for TCP and UDP
	Flows int `json:"flows"` // masqueraded, most of them idle
	// PerSecond is the number of connections that another pod opens each second on another CPU.
	PerSecond int `json:"new_per_s,omitempty"`
	// Pairs of ends are measured at once, each on a CPU of its own.
	Pairs int `json:"pairs,omitempty"`
}

var (
	// smallest is the scale at which variants are compared.
	smallest = scale{Pods: 1, Ports: 1, Flows: 1}
	// crowded must cost no more than the smallest one.
	crowded = scale{Pods: 10_000, Ports: 20_000, Flows: 500_000}
	// bothCPUs shows whether CPUs share what they write.
	bothCPUs = scale{Pods: 1, Ports: 1, Flows: 1, Pairs: 2}
)

// dimension is one of the things that may become many.
type dimension struct {
	name  string
	of    func(*scale) *int
	sizes []int
}

var dimensions = []dimension{
	{"containers", func(s *scale) *int { return &s.Pods }, []int{100, 1000, 10_000}},
	{"host ports", func(s *scale) *int { return &s.Ports }, []int{100, 1000, 20_000}},
	{"remembered flows", func(s *scale) *int { return &s.Flows }, []int{1000, 50_000, 500_000}},
	{"new connections per second", func(s *scale) *int { return &s.PerSecond }, []int{1000, 10_000, 100_000}},
}

// at returns the smallest scale except for one dimension.
func (d dimension) at(size int) scale {
	s := smallest
	*d.of(&s) = size
	return s
}

func allScales() []scale {
	var all []scale
	for _, d := range dimensions {
		for _, size := range d.sizes {
			all = append(all, d.at(size))
		}
	}
	return append(all, bothCPUs)
}

// isLoad reports whether the scale is a load at the same time, not a number of objects.
func (s scale) isLoad() bool { return s.PerSecond > 0 || s.Pairs > 0 }

// String lists the dimensions that exceed the smallest scale.
func (s scale) String() string {
	var parts []string
	for _, d := range dimensions {
		if size := *d.of(&s); size != *d.of(&smallest) {
			parts = append(parts, testenv.Thousands(size)+" "+d.name)
		}
	}
	if s.Pairs > 0 {
		parts = append(parts, "both CPUs at once")
	}
	return cmp.Or(strings.Join(parts, ", "), "one of each")
}

func (s scale) name() string {
	return fmt.Sprintf("%d-%d-%d-%d-%d", s.Pods, s.Ports, s.Flows, s.PerSecond, s.Pairs)
}

// scaled reports whether a variant is measured at all scales. A bare veth shows what the machine itself
// loses while another CPU works.
func (v variant) scaled() bool { return v.name == establishedName || v.name == bareName }

// scaledWorkloads are those whose cost per packet the tables of scales have.
var scaledWorkloads = []string{"udp-packets", "tcp-rr", "tcp-crr"}

// measures reports whether traffic is measured at a scale other than the smallest.
func (s scale) measures(t traffic) bool {
	if t.path.name == podNode || s.Pairs > 0 && t.path.name == "outside-port" { // has one port
		return false
	}
	if slices.Contains(scaledWorkloads, t.workload.name) {
		return true
	}
	return s == crowded && slices.ContainsFunc(trafficTargets, func(target trafficTarget) bool {
		return target.row == row{t.path.name, t.workload.name, ""}
	})
}
