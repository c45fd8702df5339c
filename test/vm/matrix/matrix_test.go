package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const printed = `=== RUN   TestLoad
--- PASS: TestLoad (6.28s)
=== RUN   TestSpec
    load_test.go:97: kernel 5.10.0-46-amd64: attaches by clsact, finds source addresses by uplink entry
--- PASS: TestSpec (0.00s)
=== RUN   TestKinds
=== RUN   TestKinds/bridge
=== RUN   TestKinds/bond
    kinds_test.go:16: feature bonding: not in this kernel's configuration: operation not supported
--- PASS: TestKinds (2.00s)
    --- PASS: TestKinds/bridge (1.00s)
    --- SKIP: TestKinds/bond (0.00s)
=== RUN   TestTCX
    tcx_test.go:7: feature tcx: since kernel 6.6, this is 5.10
--- SKIP: TestTCX (0.00s)
`

func TestReport(t *testing.T) {
	for name, test := range map[string]struct {
		text, counts string
		wrong        []string // in the error
	}{
		"all well": {printed + "PASS\n", "3 passed, 2 skipped", nil},
		"a failure in a subtest": {
			printed + "=== RUN   TestA\n=== RUN   TestA/b\n    a_test.go:1: wrong\n--- FAIL: TestA (0.00s)\n    --- FAIL: TestA/b (0.00s)\n    --- PASS: TestA/c (0.00s)\nFAIL\n",
			"4 passed, 2 skipped, 1 failed", []string{"TestA/b failed"},
		},
		"a failure beside subtests": {
			printed + "--- FAIL: TestA (0.00s)\n    --- PASS: TestA/c (0.00s)\nFAIL\n",
			"4 passed, 2 skipped, 1 failed", []string{"TestA failed"},
		},
		"a skip without a feature": {
			printed + "=== RUN   TestA\n    a_test.go:1: not today\n--- SKIP: TestA (0.00s)\nPASS\n",
			"3 passed, 3 skipped", []string{"TestA skips"},
		},
		"no end":   {printed + "=== RUN   TestA\n", "3 passed, 2 skipped, did not end well", []string{"did not end well"}},
		"no tests": {"testing: warning: no tests to run\nPASS\n", "0 passed", []string{"no test passed"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := parseReport(test.text)
			if r.String() != test.counts {
				t.Errorf("counts are %q, want %q", r, test.counts)
			}
			err := r.check()
			if (err == nil) != (test.wrong == nil) {
				t.Errorf("error is %v, want %q", err, test.wrong)
			}
			for _, wrong := range test.wrong {
				if err != nil && !strings.Contains(err.Error(), wrong) {
					t.Errorf("error is %v, want %q", err, wrong)
				}
			}
		})
	}
}

// TestSuites wants every name in the patterns to match a test, since a renamed test would be left out silently.
func TestSuites(t *testing.T) {
	for _, s := range suites {
		files, err := filepath.Glob("../../" + s.name + "/*_test.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("no tests of %s: %v", s.name, err)
		}
		var tests []string
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(string(text), -1) {
				tests = append(tests, match[1])
			}
		}
		for _, pattern := range []string{s.tests, s.quick} {
			for name := range strings.SplitSeq(strings.TrimSuffix(strings.TrimPrefix(pattern, "^Test("), ")$"), "|") {
				if pattern != "." && !slices.ContainsFunc(tests, regexp.MustCompile("^Test"+name+"$").MatchString) {
					t.Errorf("%s: no test matches %s", s.name, name)
				}
			}
		}
	}
}
