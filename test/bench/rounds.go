package main

import (
	"fmt"
	"math"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// traffic is one kind of work on one path of a setup.
type traffic struct {
	path   path
	family family
	work   work
	ends   ends
}

func trafficOf(s *setup) []traffic {
	var all []traffic
	for _, p := range paths {
		for _, f := range families {
			for _, w := range works {
				if e, ok := p.ends(s, f); ok {
					all = append(all, traffic{p, f, w, e})
				}
			}
		}
	}
	return all
}

// run is one run of the benchmark.
type run struct {
	*testenv.Machine
	form     form
	progress *progress
	setups   []*setup
	result   *result

	traffic map[trafficKey]*trafficResult
	calls   map[callKey]*callResult
	alone   map[callKey][]float64 // of all rounds
}

type trafficKey struct{ setup, path, family, work string }

var verbs = [2]string{"ADD", "DEL"}

type callKey struct{ setup, verb string }

// measure does all rounds. In each, everything that is compared is done one after the other, in
// an order that moves on by one from round to round.
func (r *run) measure() {
	defer quiet()()
	for round := range r.form.rounds {
		order := rotated(r.setups, round)
		for _, p := range paths {
			for _, f := range families {
				for _, w := range works {
					r.progress.say("round %d of %d: %s, %s, %s", round+1, r.form.rounds, w.title, p.title, f.name)
					for _, s := range order {
						if e, ok := p.ends(s, f); ok {
							r.measureTraffic(s, traffic{p, f, w, e})
						}
					}
				}
			}
		}
		for _, s := range order {
			r.progress.say("round %d of %d: ADD and DEL, %s", round+1, r.form.rounds, s.title)
			r.measureCalls(s)
		}
	}
}

// rotated begins with another one each time.
func rotated[T any](all []T, by int) []T {
	if len(all) == 0 {
		return nil
	}
	by %= len(all)
	return append(append([]T(nil), all[by:]...), all[:by]...)
}

func (r *run) measureTraffic(s *setup, t traffic) {
	key := trafficKey{s.name(), t.path.name, t.family.name, t.work.name}
	into := r.traffic[key]
	if into == nil {
		into = &trafficResult{Setup: s.name(), Path: key.path, Family: key.family, Work: key.work, Unit: t.work.unit}
		r.traffic[key] = into
	}
	got, err := t.work.run(t.ends, r.form.slice)
	if err != nil {
		into.Error, got = err.Error(), sample{}
	}
	into.Rates = append(into.Rates, math.Round(got.rate))
	into.Lost += got.lost
	if got.p50 > 0 {
		into.P50 = append(into.P50, micros(got.p50))
		into.P99 = append(into.P99, micros(got.p99))
	}
	r.progress.done(1)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func (r *run) measureCalls(s *setup) {
	if s.attachments == nil {
		return
	}
	add, del, err := measureCalls(s.attachments, r.form.callsOf(s), s.scale == smallest)
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
		if len(got.alone) > 0 {
			into.Alone = append(into.Alone, quantile(got.alone, 0.5))
		}
		into.AtOnce = append(into.AtOnce, got.atOnce)
		r.alone[key] = append(r.alone[key], got.alone...)
	}
	r.progress.done(r.form.callsOf(s))
}

// look takes down what else there is to see of the setups. What cannot be seen is told, and costs
// nothing of what was measured.
func (r *run) look() {
	for _, s := range r.setups {
		if err := r.lookAt(s); err != nil {
			r.result.Unseen = append(r.result.Unseen, fmt.Sprintf("%s: %v", s.name(), err))
		}
	}
}

func (r *run) lookAt(s *setup) (err error) {
	of := r.find(s.name())
	if of.GSO, err = s.gsoSize(); err != nil || !s.ours {
		return err
	}
	if of.Objects, err = s.objects(); err != nil || s.scale != smallest {
		return err
	}
	r.progress.say("what the programs take, %s", s.title)
	costs, err := s.programCosts(r.form.slice)
	r.result.Programs = append(r.result.Programs, costs...)
	return err
}
