package main

import (
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// traffic is a workload on a path of a setup.
type traffic struct {
	path     path
	family   testenv.Family
	workload workload
	ends     ends
}

// cells lists all measurements of a run in their order, without ends.
func (s *selection) cells() []traffic {
	var all []traffic
	for _, p := range paths {
		for _, f := range testenv.Families {
			for _, w := range workloads {
				if has(s.paths, p.name) && has(s.families, f.Name) && has(s.workloads, w.name) {
					all = append(all, traffic{path: p, family: f, workload: w})
				}
			}
		}
	}
	return all
}

// between returns the traffic with its ends in a setup, and whether the setup has the path.
func (t traffic) between(s *setup) (_ traffic, ok bool) {
	if ok = s.hasPath(t.path.name); ok {
		t.ends = t.path.ends(s, t.family)
	}
	return t, ok
}

// on returns the traffic with its ends in a setup, and whether it is measured there.
func (t traffic) on(s *setup) (traffic, bool) {
	if !s.measures(t) {
		return t, false
	}
	return t.between(s)
}

// trafficOf lists the selected traffic of a setup.
func (s *selection) trafficOf(on *setup) []traffic {
	var all []traffic
	for _, t := range s.cells() {
		if t, ok := t.on(on); ok {
			all = append(all, t)
		}
	}
	return all
}

// run is one run of the benchmark.
type run struct {
	*testenv.Machine
	selection
	plan     plan
	progress *progress
	setups   []*setup
	others   *testenv.Pod // opens connections in the background; nil if nothing does
	result   *result

	traffic    map[trafficKey]*trafficResult
	calls      map[callKey]*callResult
	sequential map[callKey][]float64 // of all rounds
}

type trafficKey struct{ setup, path, family, workload string }

var verbs = [2]string{"ADD", "DEL"}

type callKey struct{ setup, verb string }

// measure runs all rounds. Within a round, all setups are measured right after each other for each
// workload; each round starts with another setup.
func (r *run) measure() {
	defer pauseGC()()
	for round := range r.plan.rounds {
		order := rotated(r.setups, round)
		for _, t := range r.cells() {
			r.progress.printf("round %d of %d: %s, %s, %s", round+1, r.plan.rounds, t.workload.title, t.path.title, t.family.Name)
			for _, s := range order {
				if t, ok := t.on(s); ok {
					r.measureTraffic(s, t)
				}
			}
		}
		for _, s := range order {
			r.progress.printf("round %d of %d: ADD and DEL, %s", round+1, r.plan.rounds, s.variant.title)
			r.measureCalls(s)
		}
		runtime.GC() // what the calls have left, so that it is not collected during traffic
	}
}

// rotated returns all, starting with the element at index by.
func rotated[T any](all []T, by int) []T {
	if len(all) == 0 {
		return nil
	}
	by %= len(all)
	return append(append([]T(nil), all[by:]...), all[:by]...)
}

func (r *run) measureTraffic(s *setup, t traffic) {
	key := trafficKey{s.name(), t.path.name, t.family.Name, t.workload.name}
	into := r.traffic[key]
	if into == nil {
		into = &trafficResult{Setup: s.name(), Path: key.path, Family: key.family, Workload: key.workload, Unit: t.workload.unit}
		r.traffic[key] = into
	}
	got, err := r.sample(s, t)
	if err != nil {
		into.Error, got = err.Error(), sample{}
	}
	into.Rates = append(into.Rates, math.Round(got.rate))
	into.Lost += got.lost
	if got.p50 > 0 {
		into.P50 = append(into.P50, micros(got.p50))
		into.P99 = append(into.P99, micros(got.p99))
		into.P999 = append(into.P999, micros(got.p999))
	}
	r.progress.done(1)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func (r *run) measureCalls(s *setup) {
	if s.attachments == nil {
		return
	}
	add, del, err := measureCalls(s.attachments, r.plan.callsOf(s), s.isMain())
	for verb, got := range map[string]calls{verbs[0]: add, verbs[1]: del} {
		key := callKey{s.name(), verb}
		into := r.calls[key]
		if into == nil {
			into = &callResult{Setup: s.name(), Verb: verb}
			r.calls[key] = into
		}
		if err != nil {
			into.Error = err.Error()
		}
		if len(got.sequential) > 0 {
			into.Sequential = append(into.Sequential, quantile(got.sequential, 0.5))
		}
		into.Concurrent = append(into.Concurrent, got.concurrent)
		r.sequential[key] = append(r.sequential[key], got.sequential...)
	}
	r.progress.done(r.plan.callsOf(s))
}

// inspect adds the memory of maps to the result. A setup that cannot be inspected is reported, and keeps its
// measurements.
func (r *run) inspect() {
	for _, s := range r.setups {
		if !s.ours || !s.uplink.isDefault() || s.isLoad() {
			continue
		}
		all, err := s.objects()
		if err != nil {
			r.result.NotInspected = append(r.result.NotInspected, fmt.Sprintf("%s: %v", s.name(), err))
		}
		r.find(s.name()).Objects = all
	}
}
