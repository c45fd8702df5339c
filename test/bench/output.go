package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// write prints the tables and writes the files that the options name.
func (r *result) write(opts options) error {
	fmt.Print(r.tables())
	if opts.json != "" {
		text, err := r.json()
		if err != nil {
			return err
		}
		if err := save(opts.json, text); err != nil {
			return err
		}
	}
	if opts.results == "" {
		return nil
	}
	return save(opts.results, []byte(r.report()))
}

// referenceOf names the variant that has ratio 1 on a path: a bare veth has no outside.
func referenceOf(path string) string {
	switch path {
	case podPod:
		return bareName
	case podNode:
		return routesName
	case podService, outsideService:
		return ruledName(ptpName, rulesets[1])
	case nodeService:
		return ruledName(routesName, rulesets[1])
	}
	return plainName
}

// tables returns all tables, from traffic to targets.
func (r *result) tables() string {
	var out strings.Builder
	section := func(title string, t *table) {
		if len(t.rows) > 1 {
			fmt.Fprintf(&out, "\n%s\n\n%s", title, t)
		}
	}
	fmt.Fprintf(&out, "%s\n", r.conditions())
	for _, p := range paths {
		section(fmt.Sprintf("%s: ratio to %s, median (quartiles)", p.title, variantTitle(referenceOf(p.name))), r.trafficTable(p.name))
	}
	section("ADD and DEL of a pod with a host port", r.callTable())
	section("Scale: ratio to one of each", r.scaleTable())
	section("Memory of maps for one more", r.unitTable())
	section("Targets", r.targetTable())
	for _, s := range r.Setups {
		if small, ok := r.setup(s.Variant); s.Absent != "" && (!ok || s.scale == smallest || small.Absent == "") {
			fmt.Fprintf(&out, "\nabsent: %s, %s: %s\n", s.Title, s.scale, s.Absent)
		}
	}
	for _, reason := range r.NotInspected {
		fmt.Fprintf(&out, "\nnot inspected: %s\n", reason)
	}
	for _, t := range r.Traffic {
		if t.Error != "" {
			fmt.Fprintf(&out, "\nfailed: %s, %s, %s, %s: %s\n", t.Setup, t.Path, t.Family, t.Workload, t.Error)
		}
	}
	for _, c := range r.Calls {
		if c.Error != "" {
			fmt.Fprintf(&out, "\nfailed: %s, %s: %s\n", c.Setup, c.Verb, c.Error)
		}
	}
	return out.String()
}

// conditions returns the date, kernel and machine of the measurement.
func (r *result) conditions() string {
	return fmt.Sprintf("`%s` of %s on Linux %s, %d × %s; %d rounds, %d ms each.",
		r.Command, r.Date.Format("2006-01-02 15:04 MST"), r.Kernel, r.CPUs, r.CPU, r.Rounds, r.SliceMS)
}

func (r *result) trafficTable(path string) *table {
	t := new(table)
	titles := []string{"", "family"}
	measured := r.workloadsOn(path)
	for _, w := range measured {
		titles = append(titles, w.title)
	}
	t.add(titles...)
	against := referenceOf(path)
	for _, s := range r.present() {
		for _, f := range testenv.Families {
			cells := []string{s.Title, f.Name}
			for _, w := range measured {
				rates := r.rates(s.Name, path, f.Name, w.name)
				switch all := ratios(rates, r.rates(against, path, f.Name, w.name)); {
				case s.Name == against && len(rates) == 0:
					cells = append(cells, "")
				case s.Name == against:
					cells = append(cells, "1 = "+amount(quantile(rates, 0.5))+w.unit)
				case len(all) == 0:
					cells = append(cells, "")
				default:
					cells = append(cells, spreadOf(all).String())
				}
			}
			if strings.Join(cells[2:], "") != "" {
				t.add(cells...)
			}
		}
	}
	return t
}

// workloadsOn returns the workloads that the run has measured on a path.
func (r *result) workloadsOn(path string) []workload {
	return slices.DeleteFunc(slices.Clone(workloads), func(w workload) bool {
		return !slices.ContainsFunc(r.Traffic, func(t trafficResult) bool { return t.Path == path && t.Workload == w.name })
	})
}

func (r *result) callTable() *table {
	t := new(table)
	t.add("", "", "ADD p50", "p99", "16 concurrent", "DEL p50", "p99", "16 concurrent")
	for _, s := range r.Setups {
		cells := []string{s.Title, s.scale.String()}
		for _, verb := range verbs {
			c := r.calls(s.Name, verb)
			if len(c.Sequential) == 0 {
				continue
			}
			cells = append(cells, fmt.Sprintf("%.1f ms", c.P50), fmt.Sprintf("%.1f ms", c.P99), "")
			if s.scale == smallest {
				cells[len(cells)-1] = fmt.Sprintf("%.0f/s", quantile(c.Concurrent, 0.5))
			}
		}
		if len(cells) == len(t.rows[0]) {
			t.add(cells...)
		}
	}
	return t
}
