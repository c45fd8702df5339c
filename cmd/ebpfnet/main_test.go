package main

import (
	"os"
	"strings"
	"testing"
)

// TestExample requires that the README shows the example that the demo runs.
func TestExample(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```json\n"+example+"```\n") {
		t.Error("README.md has no json block that equals example.conflist")
	}
}
