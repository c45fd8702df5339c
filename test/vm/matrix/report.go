package main

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// report is the parsed output of a test binary with -test.v.
type report struct {
	results  map[string]string   // PASS, FAIL or SKIP, by test
	output   map[string][]string // lines, by test
	features map[string]bool     // missing features that made tests skip, with the reason
	clean    bool                // the run came to its end, with status 0 unless a test failed
	last     []string            // lines of the whole output

	// Facts about the kernel that the tests of package prog log.
	release, attach, source string
}

// lastLines is the number of lines to show of a run that did not end well.
const lastLines = 40

var (
	startLine   = regexp.MustCompile(`^=== (?:RUN|NAME|CONT) +(\S+)$`)
	resultLine  = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(`)
	featureLine = regexp.MustCompile(`: feature (.+?): (since kernel [0-9.]+|not in this kernel's configuration)`)
	kernelLine  = regexp.MustCompile(`: kernel (\S+): attaches by (.+), finds source addresses by (.+)$`)
)

func parseReport(text string) *report {
	r := &report{results: make(map[string]string), output: make(map[string][]string), features: make(map[string]bool)}
	current := ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		r.last = append(r.last, line)
		if match := startLine.FindStringSubmatch(line); match != nil {
			current = match[1]
		} else if match := resultLine.FindStringSubmatch(line); match != nil {
			r.results[match[2]] = match[1]
		} else if line == "PASS" || line == "FAIL" {
			r.clean = true
		} else {
			r.output[current] = append(r.output[current], line)
			r.parseLog(line)
		}
	}
	r.last = r.last[max(0, len(r.last)-lastLines):]
	return r
}

func (r *report) parseLog(line string) {
	if match := featureLine.FindStringSubmatch(line); match != nil {
		r.features[match[1]+" ("+strings.TrimSuffix(match[2], "'s configuration")+")"] = true
	}
	if match := kernelLine.FindStringSubmatch(line); match != nil {
		r.release, r.attach, r.source = match[1], match[2], match[3]
	}
}

// tests returns the names of the tests with a result, sorted. Subtests count instead of their parent.
func (r *report) tests(result string) []string {
	counted := make(map[string]bool)
	for name, got := range r.results {
		counted[name] = got == result
	}
	for name, got := range r.results {
		for i, c := range name {
			above := name[:i]
			// A parent may fail although no subtest does.
			if c == '/' && !(r.results[above] == "FAIL" && got != "FAIL") {
				counted[above] = false
			}
		}
	}
	maps.DeleteFunc(counted, func(_ string, ok bool) bool { return !ok })
	return slices.Sorted(maps.Keys(counted))
}

// String returns the counts, for the table and the console.
func (r *report) String() string {
	text := fmt.Sprintf("%d passed", len(r.tests("PASS")))
	for _, more := range []struct{ result, word string }{{"SKIP", "skipped"}, {"FAIL", "failed"}} {
		if n := len(r.tests(more.result)); n > 0 {
			text += fmt.Sprintf(", %d %s", n, more.word)
		}
	}
	if !r.clean {
		text += ", did not end well"
	}
	return text
}

// check returns an error for every test that failed, or that skipped without naming a feature.
func (r *report) check() error {
	var errs []error
	if !r.clean {
		errs = append(errs, errors.New("the run did not end well"))
	}
	for _, name := range r.tests("FAIL") {
		errs = append(errs, fmt.Errorf("%s failed", name))
	}
	for _, name := range r.tests("SKIP") {
		if !slices.ContainsFunc(r.output[name], featureLine.MatchString) {
			errs = append(errs, fmt.Errorf("%s skips without naming a missing feature", name))
		}
	}
	if len(r.tests("PASS")) == 0 {
		errs = append(errs, errors.New("no test passed"))
	}
	return errors.Join(errs...)
}

// excerpt returns the lines to show of a run with an error.
func (r *report) excerpt() []string {
	var lines []string
	for _, name := range slices.Concat(r.tests("FAIL"), r.tests("SKIP")) {
		lines = append(append(lines, name+":"), r.output[name]...)
	}
	if !r.clean || len(lines) == 0 {
		lines = append(lines, r.last...)
	}
	return lines
}
