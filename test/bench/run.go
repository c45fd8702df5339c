package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// bench runs the benchmark from the setups to the files.
func bench(m *testenv.Machine, opts options) error {
	if err := chooseCPUs(); err != nil {
		return err
	}
	r := newRun(m, opts)
	if err := r.setUp(); err != nil {
		return err
	}
	r.progress.start(r.steps())
	r.measure()
	if err := r.checkRules(); err != nil {
		return err
	}
	r.inspect()
	r.collect()
	r.result.evaluate()
	if opts.partial() {
		r.result.forgetUnmeasured()
	}
	return r.result.write(opts)
}

func newRun(m *testenv.Machine, opts options) *run {
	r := &run{
		Machine: m, selection: opts.selection, plan: opts.plan(), progress: &progress{to: os.Stderr},
		traffic: make(map[trafficKey]*trafficResult),
		calls:   make(map[callKey]*callResult), sequential: make(map[callKey][]float64),
	}
	r.result = &result{
		Date: time.Now().UTC().Truncate(time.Second), Command: opts.command(),
		Kernel: testenv.KernelRelease(), CPU: cpuModel(), CPUs: cpuCount(),
		Rounds: r.plan.rounds, SliceMS: r.plan.slice.Milliseconds(),
	}
	return r
}

// setUp makes all setups. A scale that fails, or a variant that this binary of ebpfnet refuses, is
// absent with the reason.
func (r *run) setUp() error {
	refused := make(map[string]error)
	planned := r.plan.setups()
	for i, p := range planned {
		if !r.concerns(p) || r.isSetUp(p.insteadOf) {
			continue
		}
		r.progress.printf("set up %d of %d: %s, %s", i+1, len(planned), p.variant.title, p.scale)
		var s *setup
		err := refused[p.variant.name]
		if err == nil {
			err = r.Protect(func() (err error) { s, err = r.newSetup(p); return err })
		}
		entry := setupResult{
			Name: p.name(), Variant: p.variant.name, Title: p.variant.title, Ours: p.ours, Uplink: p.uplink.name, scale: p.scale,
		}
		switch {
		case err == nil:
			r.setups = append(r.setups, s)
		case p.rules == nil && (p.ours || p.redirect || p.join != nil || !p.isMain()):
			entry.Absent = err.Error()
			if p.isMain() {
				refused[p.variant.name] = err
			}
		default:
			return fmt.Errorf("set up %s: %w", p.variant.title, err)
		}
		r.result.Setups = append(r.result.Setups, entry)
	}
	return nil
}

// newSetup makes a setup with what its selected measurements need.
func (r *run) newSetup(p plannedSetup) (*setup, error) {
	if p.isLoad() {
		return r.underLoad(p)
	}
	s, err := newSetup(r.Machine, p)
	if err == nil && s.hasAttachments() && has(r.workloads, callsName) && (r.plan.slowCalls || !s.slow) {
		s.attachments, err = s.newAttachments(r.Machine)
	}
	return s, err
}

// isSetUp reports whether a variant is set up.
func (r *run) isSetUp(name string) bool {
	return slices.ContainsFunc(r.setups, func(s *setup) bool { return s.variant.name == name })
}

func (r *run) find(name string) *setupResult {
	i := slices.IndexFunc(r.result.Setups, func(s setupResult) bool { return s.Name == name })
	return &r.result.Setups[i]
}

// steps is the total for progress.
func (r *run) steps() int {
	steps := 0
	for _, s := range r.setups {
		steps += len(r.trafficOf(s))
		if s.attachments != nil {
			steps += r.plan.callsOf(s)
		}
	}
	return steps * r.plan.rounds
}

// collect moves the measurements into the result, in a fixed order.
func (r *run) collect() {
	for _, s := range r.setups {
		for _, t := range r.trafficOf(s) {
			r.result.Traffic = append(r.result.Traffic, *r.traffic[trafficKey{s.name(), t.path.name, t.family.Name, t.workload.name}])
		}
	}
	for _, s := range r.setups {
		for _, verb := range verbs {
			key := callKey{s.name(), verb}
			if c := r.calls[key]; c != nil {
				c.P50, c.P99 = quantile(r.sequential[key], 0.5), quantile(r.sequential[key], 0.99)
				r.result.Calls = append(r.result.Calls, *c)
			}
		}
	}
}

// cpuModel returns the kernel's name for the CPU.
func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown CPU"
}

func cpuCount() int {
	cpus, _ := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*")
	return len(cpus)
}
