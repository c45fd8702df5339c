package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// callsName selects ADD and DEL as a workload.
const callsName = "calls"

// selection narrows a run down, even to one cell of a table. An empty list selects everything.
type selection struct{ variants, paths, workloads, families []string }

// narrow reports whether anything is left out.
func (s *selection) narrow() bool {
	return len(s.variants)+len(s.paths)+len(s.workloads)+len(s.families) > 0
}

// concerns reports whether anything that is selected is measured on a setup.
func (s *selection) concerns(p plannedSetup) bool {
	return has(s.variants, p.variant.name) &&
		(slices.ContainsFunc(s.cells(), p.measures) || p.hasAttachments() && has(s.workloads, callsName))
}

// has reports whether a list selects a name.
func has(list []string, name string) bool { return len(list) == 0 || slices.Contains(list, name) }

// parseSelection checks the names of all lists.
func parseSelection(variantList, pathList, workloadList, familyList string) (all selection, err error) {
	known := func(name string, count int, nameOf func(int) string) names {
		n := names{option: name}
		for i := range count {
			n.known = append(n.known, nameOf(i))
		}
		return n
	}
	ofWorkloads := known("-workloads", len(workloads), func(i int) string { return workloads[i].name })
	ofWorkloads.known = append(ofWorkloads.known, callsName)
	for _, list := range []struct {
		text string
		names
		into *[]string
	}{
		{variantList, known("-only", len(variants), func(i int) string { return variants[i].name }), &all.variants},
		{pathList, known("-paths", len(paths), func(i int) string { return paths[i].name }), &all.paths},
		{workloadList, ofWorkloads, &all.workloads},
		{familyList, known("-families", len(testenv.Families), func(i int) string { return testenv.Families[i].Name }), &all.families},
	} {
		if *list.into, err = list.parse(list.text); err != nil {
			return all, err
		}
	}
	return all, nil
}

// names are the values that an option takes.
type names struct {
	option string
	known  []string
}

// parse splits a list at its commas.
func (n names) parse(text string) ([]string, error) {
	if text == "" {
		return nil, nil
	}
	list := strings.Split(text, ",")
	for _, name := range list {
		if !slices.Contains(n.known, name) {
			return nil, fmt.Errorf("%s %q: expected some of %s", n.option, name, strings.Join(n.known, ","))
		}
	}
	return list, nil
}
