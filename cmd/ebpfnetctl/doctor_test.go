package main

import (
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/doctor"
)

// TestChecksAreDocumented wants each check in the README.
func TestChecksAreDocumented(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(text), "\n## doctor\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, name := range doctor.Checks() {
		if !found || !strings.Contains(section, "`"+name+"`") {
			t.Errorf("README.md: no check `%s` in the section doctor", name)
		}
	}
}
