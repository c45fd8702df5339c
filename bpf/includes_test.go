package bpf

import (
	"os"
	"regexp"
	"testing"
)

var includeLine = regexp.MustCompile(`(?m)^#include "(.+)"`)

// TestIncludeDepth bounds the longest chain of includes, so that whoever changes a header need not read all others.
func TestIncludeDepth(t *testing.T) {
	files := map[string]bool{"datapath.c": true, "stack_drops.c": true}
	for depth := 1; len(files) > 0; depth++ {
		if depth > 12 {
			t.Fatalf("got chains of %d files, to %v, want at most 12", depth, files)
		}
		included := map[string]bool{}
		for file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range includeLine.FindAllSubmatch(text, -1) {
				included[string(match[1])] = true
			}
		}
		files = included
	}
}
