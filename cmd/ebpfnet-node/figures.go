package main

import (
	"maps"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
)

// figures are the metrics of NetworkPolicies. A published name must not change.
type figures struct {
	compile, latency prometheus.Histogram
	host             policyTarget

	mu     sync.Mutex
	have   *policies.Present
	before map[policies.Denier]uint64 // nil: those before the agent's start do not count
	denied map[deniedBy]float64
}

type deniedBy struct {
	policy    string // namespace/name, or a ClusterNetworkPolicy's name
	direction int
}

var (
	ruleSets = prometheus.NewDesc("ebpfnet_policy_rule_sets", "Rule sets that NetworkPolicies compile to for pods of this node.", nil, nil)
	classes  = prometheus.NewDesc("ebpfnet_policy_classes", "Classes of pods that these rule sets tell apart.", nil, nil)
	denied   = prometheus.NewDesc("ebpfnet_policy_denied_packets_total",
		"Packets that rules of pods have dropped since the agent's start, at each policy that isolates the pod.",
		[]string{"namespace", "policy", "direction"}, nil)
)

func newFigures(host policyTarget) *figures {
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "ebpfnet", Subsystem: "policy", Name: name, Help: help,
			Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60},
		})
	}
	return &figures{
		compile: histogram("compile_seconds", "How long it takes to compile all policies."),
		latency: histogram("event_to_kernel_seconds", "From an event's arrival at the agent until the datapath follows it."),
		host:    host, have: &policies.Present{}, denied: map[deniedBy]float64{},
	}
}

// set notes what the datapath has, and forgets the counts of policies that isolate no pod any more: users can make any number.
func (f *figures) set(have *policies.Present) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.have = have
	isIsolating := map[deniedBy]bool{}
	for _, rules := range have.Pods {
		for direction := range rules.Sets {
			for _, policy := range rules.Isolating(direction) {
				isIsolating[deniedBy{policy, direction}] = true
			}
		}
	}
	maps.DeleteFunc(f.denied, func(by deniedBy, _ float64) bool { return !isIsolating[by] })
}

// count adds the packets since the last call to the policies of their pods. Counters that cannot be read wait for the next
// call.
func (f *figures) count() {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, err := f.host.Denials()
	if err != nil {
		return
	}
	for at, packets := range now {
		rules := f.have.Pods[at.Pod]
		if since := packets - min(f.before[at], packets); rules != nil && since > 0 && f.before != nil {
			for _, policy := range rules.Isolating(at.Direction) {
				f.denied[deniedBy{policy, at.Direction}] += float64(since)
			}
		}
	}
	f.before = now
	if now == nil { // nothing is loaded
		f.before = map[policies.Denier]uint64{}
	}
}

// Describe sends all metrics.
func (f *figures) Describe(to chan<- *prometheus.Desc) {
	f.compile.Describe(to)
	f.latency.Describe(to)
	for _, d := range []*prometheus.Desc{ruleSets, classes, denied} {
		to <- d
	}
}

// Collect sends the figures.
func (f *figures) Collect(to chan<- prometheus.Metric) {
	f.count()
	f.compile.Collect(to)
	f.latency.Collect(to)
	f.mu.Lock()
	defer f.mu.Unlock()
	sets := map[*ebpfmaps.RuleSet]bool{}
	for _, rules := range f.have.Pods {
		for _, set := range rules.Sets {
			if set != nil {
				sets[set] = true
			}
		}
	}
	to <- prometheus.MustNewConstMetric(ruleSets, prometheus.GaugeValue, float64(len(sets)))
	to <- prometheus.MustNewConstMetric(classes, prometheus.GaugeValue, float64(len(f.have.Selectors)))
	for by, packets := range f.denied {
		namespace, name, isNamespaced := strings.Cut(by.policy, "/")
		if !isNamespaced {
			namespace, name = "", by.policy
		}
		to <- prometheus.MustNewConstMetric(denied, prometheus.CounterValue, packets, namespace, name, [...]string{"ingress", "egress"}[by.direction])
	}
}
