package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
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

// TestExamples requires that the examples for runtimes differ from the README's in what these runtimes support, and in
// nothing else.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("examples/*.conflist")
	if err != nil || len(files) == 0 {
		t.Fatalf("find the examples: got %q, %v", files, err)
	}
	want := withoutRuntime(t, "example.conflist")
	for _, file := range files {
		if got := withoutRuntime(t, file); !reflect.DeepEqual(got, want) {
			t.Errorf("%s without version and capabilities: got %v, want %v as in example.conflist", file, got, want)
		}
	}
}

// withoutRuntime returns a configuration without the keys that depend on the runtime.
func withoutRuntime(t *testing.T, file string) map[string]any {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var list map[string]any
	if err := json.Unmarshal(content, &list); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	delete(list, "cniVersion")
	delete(list["plugins"].([]any)[0].(map[string]any), "capabilities")
	return list
}
