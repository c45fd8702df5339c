package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// result has everything that a run measures. It is written as JSON.
type result struct {
	Date    time.Time `json:"date"`
	Command string    `json:"command"`
	Kernel  string    `json:"kernel"`
	CPU     string    `json:"cpu"`
	CPUs    int       `json:"cpus"`
	Rounds  int       `json:"rounds"`
	SliceMS int64     `json:"slice_ms"`

	Setups       []setupResult   `json:"setups"`
	Traffic      []trafficResult `json:"traffic"`
	Calls        []callResult    `json:"calls"`
	Targets      []verdict       `json:"targets"`
	NotInspected []string        `json:"not_inspected,omitempty"` // setups, and why
}

// setupResult describes a setup, or why it is absent.
type setupResult struct {
	Name    string `json:"name"`
	Variant string `json:"variant"`
	Title   string `json:"title"`
	Ours    bool   `json:"ours,omitempty"`
	Uplink  string `json:"uplink,omitempty"` // kind; empty: the default
	scale
	Absent  string   `json:"absent,omitempty"`
	Objects *objects `json:"objects,omitempty"`
}

// trafficResult has one value per round, 0 if it failed.
type trafficResult struct {
	Setup    string    `json:"setup"`
	Path     string    `json:"path"`
	Family   string    `json:"family"`
	Workload string    `json:"workload"`
	Unit     string    `json:"unit"`
	Rates    []float64 `json:"rates"`
	P50      []float64 `json:"p50_us,omitempty"`
	P99      []float64 `json:"p99_us,omitempty"`
	P999     []float64 `json:"p999_us,omitempty"`
	Lost     int       `json:"lost,omitempty"`
	Error    string    `json:"error,omitempty"` // of the last failure
}

// callResult has one value of ADD or DEL per round.
type callResult struct {
	Setup      string    `json:"setup"`
	Verb       string    `json:"verb"`
	Sequential []float64 `json:"sequential_ms"` // medians
	P50        float64   `json:"p50_ms"`        // of all rounds
	P99        float64   `json:"p99_ms"`
	Concurrent []float64 `json:"concurrent_per_s"`
	Error      string    `json:"error,omitempty"`
}

// setup finds a setup by its name.
func (r *result) setup(name string) (setupResult, bool) {
	i := slices.IndexFunc(r.Setups, func(s setupResult) bool { return s.Name == name })
	if i < 0 {
		return setupResult{}, false
	}
	return r.Setups[i], true
}

// rates returns the rates of all rounds, nil if they were not measured.
func (r *result) rates(setup, path, family, workload string) []float64 {
	for _, t := range r.Traffic {
		if t.Setup == setup && t.Path == path && t.Family == family && t.Workload == workload {
			return t.Rates
		}
	}
	return nil
}

func (r *result) calls(setup, verb string) callResult {
	for _, c := range r.Calls {
		if c.Setup == setup && c.Verb == verb {
			return c
		}
	}
	return callResult{}
}

// isMain reports whether this is the variant's setup for comparisons with others.
func (s setupResult) isMain() bool { return s.Uplink == "" && s.scale == smallest }

// present returns the main setups that are not absent.
func (r *result) present() []setupResult {
	var all []setupResult
	for _, s := range r.Setups {
		if s.Absent == "" && s.isMain() {
			all = append(all, s)
		}
	}
	return all
}

// save replaces a file atomically.
func save(path string, content []byte) error {
	temporary := path + ".tmp"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(temporary, content, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

func (r *result) json() ([]byte, error) {
	text, err := json.MarshalIndent(r, "", " ")
	return append(text, '\n'), err
}
