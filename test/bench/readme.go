package main

import (
	"fmt"
	"os"
	"strings"
)

// The figures are in README between these lines.
const (
	figuresBegin = "<!-- bench: `make bench` writes what is between these two lines -->"
	figuresEnd   = "<!-- /bench -->"
)

func (r *result) renewReadme(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(text), figuresBegin)
	_, tail, ok2 := strings.Cut(rest, figuresEnd)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no lines %q and %q", file, figuresBegin, figuresEnd)
	}
	return save(file, []byte(head+figuresBegin+"\n\n"+r.figures()+"\n"+figuresEnd+tail))
}

// figures is what the README shows.
func (r *result) figures() string {
	return fmt.Sprintf("![ratios of traffic, and times of ADD and DEL](test/bench/bench.svg)\n\n%s\n%s", r.targetTable(), r.circumstances()) + "\n"
}

// targetTable has a row for each target, and a column for each of ours.
func (r *result) targetTable() *table {
	t := new(table)
	var ours []setupResult
	titles := []string{"work", "against", "wanted"}
	for _, v := range r.Targets {
		if s, ok := r.setup(v.Setup); ok && v.Target == r.Targets[0].Target {
			ours = append(ours, s)
			titles = append(titles, s.Title)
		}
	}
	t.add(titles...)
	for i := 0; i < len(r.Targets); i += len(ours) {
		v := r.Targets[i]
		cells := []string{v.Target, v.Against, "at least " + ratio(v.Want)}
		if v.AtMost {
			cells[2] = "at most " + ratio(v.Want)
		}
		for _, v := range r.Targets[i : i+len(ours)] {
			cells = append(cells, v.String())
		}
		t.add(cells...)
	}
	return t
}

// String is a cell of the table.
func (v verdict) String() string {
	var parts []string
	for _, m := range v.Measured {
		parts = append(parts, strings.TrimSpace(m.spread.String()+" "+m.What))
	}
	switch {
	case len(parts) == 0:
		return "not measured"
	case v.Reached:
		return strings.Join(parts, ", ") + ": reached"
	}
	return strings.Join(parts, ", ") + ": **missed**"
}
