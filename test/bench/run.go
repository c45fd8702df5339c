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

// bench does everything from the setups to the files.
func bench(m *testenv.Machine, opts options) (err error) {
	if cpu, err = lastCPU(); err != nil {
		return err
	}
	r := newRun(m, opts)
	if err := r.setUp(opts); err != nil {
		return err
	}
	r.progress.start(r.steps())
	r.measure()
	r.look()
	r.progress.end()
	r.collect()
	if opts.only == "" {
		r.result.judge()
	}
	return r.result.tell(opts)
}

func newRun(m *testenv.Machine, opts options) *run {
	r := &run{
		Machine: m, form: full, progress: newProgress(os.Stderr),
		traffic: make(map[trafficKey]*trafficResult),
		calls:   make(map[callKey]*callResult), alone: make(map[callKey][]float64),
	}
	if opts.quick {
		r.form = quick
	}
	r.result = &result{
		Date: time.Now().UTC().Truncate(time.Second), Command: "make " + r.form.name,
		Kernel: testenv.KernelRelease(), CPU: cpuModel(), CPUs: cpuCount(),
		Rounds: r.form.rounds, SliceMS: r.form.slice.Milliseconds(),
	}
	return r
}

// setUp makes all setups. What is refused is absent, with the reason, if it is ours.
func (r *run) setUp(opts options) error {
	refused := make(map[string]error)
	planned := r.form.setups()
	for i, p := range planned {
		if opts.only != "" && !slices.Contains(strings.Split(opts.only, ","), p.variant.name) {
			continue
		}
		if r.stands(p.insteadOf) {
			continue
		}
		r.progress.say("set up %d of %d: %s, %s", i+1, len(planned), p.title, p.scale)
		var s *setup
		err := refused[p.variant.name]
		if err == nil {
			err = r.Protect(func() (err error) { s, err = newSetup(r.Machine, p.variant, p.scale); return err })
		}
		of := setupResult{
			Name: scaledName(p.variant.name, p.scale), Variant: p.variant.name, Title: p.title, Ours: p.ours, scale: p.scale,
		}
		switch {
		case err == nil:
			r.setups = append(r.setups, s)
		case p.ours || p.scale != smallest:
			refused[p.variant.name] = err
			of.Absent = err.Error()
		default:
			return fmt.Errorf("set up %s: %w", p.title, err)
		}
		r.result.Setups = append(r.result.Setups, of)
	}
	return nil
}

// stands says whether a variant is set up.
func (r *run) stands(name string) bool {
	return slices.ContainsFunc(r.setups, func(s *setup) bool { return s.variant.name == name })
}

func (r *run) find(name string) *setupResult {
	i := slices.IndexFunc(r.result.Setups, func(s setupResult) bool { return s.Name == name })
	return &r.result.Setups[i]
}

// steps is what progress counts.
func (r *run) steps() int {
	steps := 0
	for _, s := range r.setups {
		steps += len(trafficOf(s))
		if s.attachments != nil {
			steps += r.form.callsOf(s)
		}
	}
	return steps * r.form.rounds
}

// collect puts what was measured into the result, in a steady order.
func (r *run) collect() {
	for _, s := range r.setups {
		for _, t := range trafficOf(s) {
			r.result.Traffic = append(r.result.Traffic, *r.traffic[trafficKey{s.name(), t.path.name, t.family.name, t.work.name}])
		}
	}
	for _, s := range r.setups {
		for _, verb := range verbs {
			key := callKey{s.name(), verb}
			if c := r.calls[key]; c != nil {
				c.P50, c.P99 = quantile(r.alone[key], 0.5), quantile(r.alone[key], 0.99)
				r.result.Calls = append(r.result.Calls, *c)
			}
		}
	}
}

// cpuModel is what the kernel calls the CPU, where it has a name for it.
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
