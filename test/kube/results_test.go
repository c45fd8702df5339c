package kube

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// e2eTest is one of Kubernetes' tests, as ginkgo reports it.
type e2eTest struct {
	ContainerHierarchyTexts []string
	LeafNodeText            string
	LeafNodeType            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (e e2eTest) name() string {
	return strings.Join(append(slices.Clone(e.ContainerHierarchyTexts), e.LeafNodeText), " ")
}

// e2eTests are those of the area, also those that did not run.
type e2eTests []e2eTest

// readResults reads ginkgo's report. It has all tests of the program.
func readResults(file string) (tests e2eTests, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var reports []struct{ SpecReports []e2eTest }
	if err := json.Unmarshal(content, &reports); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	for _, report := range reports {
		for _, test := range report.SpecReports {
			if test.LeafNodeType == "It" && regexp.MustCompile(area).MatchString(test.name()) {
				tests = append(tests, test)
			}
		}
	}
	slices.SortFunc(tests, func(a, b e2eTest) int { return strings.Compare(a.name(), b.name()) })
	return tests, nil
}

// whyNot returns why a test did not run, "" if it ran or should have.
func (e e2eTest) whyNot() string {
	switch reason := reasonLeftOut(e.name()); {
	case e.State != "skipped":
		return ""
	case reason != "":
		return reason
	case e.Failure.Message != "":
		return "leaves itself out: " + e.Failure.Message
	case !regexp.MustCompile(focus()).MatchString(e.name()):
		return "not selected"
	}
	return ""
}

// check wants every test that ran to have passed, and some to have.
func (tests e2eTests) check(t *testing.T) {
	t.Helper()
	counts := map[string]int{}
	for _, test := range tests {
		counts[test.State]++
		if test.whyNot() == "" && test.State != "passed" {
			t.Errorf("%s: %s: %s", test.name(), test.State, test.Failure.Message)
		}
	}
	t.Log(counts)
	if counts["passed"] == 0 {
		t.Error("no test has passed")
	}
}

// markdown has all tests in tables.
func (tests e2eTests) markdown() string {
	var ran, not strings.Builder
	for _, test := range tests {
		name := strings.TrimPrefix(test.name(), "[sig-network] ")
		if reason := test.whyNot(); reason != "" {
			fmt.Fprintf(&not, "| %s | %s |\n", name, reason)
		} else {
			fmt.Fprintf(&ran, "| %s | %s | %.0f s |\n", name, test.State, test.RunTime.Seconds())
		}
	}
	return "| test | result | time |\n|---|---|---|\n" + ran.String() + "\n| left out | because |\n|---|---|\n" + not.String()
}
