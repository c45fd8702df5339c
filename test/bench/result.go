package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"
)

// result is all that a run has seen, and what is written as JSON.
type result struct {
	Date    time.Time `json:"date"`
	Command string    `json:"command"`
	Kernel  string    `json:"kernel"`
	CPU     string    `json:"cpu"`
	CPUs    int       `json:"cpus"`
	Rounds  int       `json:"rounds"`
	SliceMS int64     `json:"slice_ms"`

	Setups   []setupResult   `json:"setups"`
	Traffic  []trafficResult `json:"traffic"`
	Calls    []callResult    `json:"calls"`
	Programs []programCost   `json:"programs"`
	Targets  []verdict       `json:"targets"`
	Unseen   []string        `json:"unseen,omitempty"` // what could not be looked at, and why
}

// setupResult tells what was compared, or why it is absent.
type setupResult struct {
	Name    string `json:"name"`
	Variant string `json:"variant"`
	Title   string `json:"title"`
	Ours    bool   `json:"ours,omitempty"`
	scale
	Absent  string   `json:"absent,omitempty"`
	GSO     int      `json:"gso_max_size,omitempty"` // of the pod's device
	Objects *objects `json:"objects,omitempty"`
}

// trafficResult has one value per round, 0 for one that failed.
type trafficResult struct {
	Setup  string    `json:"setup"`
	Path   string    `json:"path"`
	Family string    `json:"family"`
	Work   string    `json:"work"`
	Unit   string    `json:"unit"`
	Rates  []float64 `json:"rates"`
	P50    []float64 `json:"p50_us,omitempty"`
	P99    []float64 `json:"p99_us,omitempty"`
	Lost   int       `json:"lost,omitempty"`
	Error  string    `json:"error,omitempty"` // the last one
}

// callResult is about ADD or DEL, with one value per round.
type callResult struct {
	Setup  string    `json:"setup"`
	Verb   string    `json:"verb"`
	Alone  []float64 `json:"alone_ms"` // medians
	P50    float64   `json:"p50_ms"`   // of all rounds
	P99    float64   `json:"p99_ms"`
	AtOnce []float64 `json:"at_once_per_s"`
	Error  string    `json:"error,omitempty"`
}

// setup finds a setup by its name.
func (r *result) setup(name string) (setupResult, bool) {
	i := slices.IndexFunc(r.Setups, func(s setupResult) bool { return s.Name == name })
	if i < 0 {
		return setupResult{}, false
	}
	return r.Setups[i], true
}

// rates returns what a setup did in each round, nothing where that was not measured.
func (r *result) rates(setup, path, family, work string) []float64 {
	for _, t := range r.Traffic {
		if t.Setup == setup && t.Path == path && t.Family == family && t.Work == work {
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

// present returns the setups of the smallest scale that are there.
func (r *result) present() []setupResult {
	var all []setupResult
	for _, s := range r.Setups {
		if s.Absent == "" && s.scale == smallest {
			all = append(all, s)
		}
	}
	return all
}

// save writes a file as a whole or not at all.
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

// lists are those of numbers, which MarshalIndent gives a line for each.
var lists = regexp.MustCompile(`\[[-0-9.e+,\s]+\]`)

func (r *result) json() ([]byte, error) {
	text, err := json.MarshalIndent(r, "", " ")
	text = lists.ReplaceAllFunc(text, func(list []byte) []byte { return bytes.Join(bytes.Fields(list), nil) })
	return append(text, '\n'), err
}

// readResult reads what an earlier run has written.
func readResult(path string) (*result, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := new(result)
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return r, nil
}
