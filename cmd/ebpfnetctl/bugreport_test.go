package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestBugreportInterrupted leaves no half of a report.
func TestBugreportInterrupted(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	stop()
	file := filepath.Join(t.TempDir(), "a.tar.gz")
	var out, errs strings.Builder
	code := run(ctx, []string{"bugreport", file}, &out, &errs)
	if _, err := os.Stat(file); code != exitError || !os.IsNotExist(err) || !strings.Contains(errs.String(), "interrupted") {
		t.Errorf("got exit code %d, %q, %v; want 1, a word, and no file", code, errs.String(), err)
	}
}

// TestBugreportCommands wants the read commands that need no argument, with the flags that they share with it.
func TestBugreportCommands(t *testing.T) {
	cmd, _, err := newRoot().Find([]string{"bugreport"})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.ParseFlags([]string{"--data-dir", "/d", "--cache-dir", "/c", "--conf-dir", "/n"}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, words := range readCommands(cmd) {
		got = append(got, strings.Join(words, " "))
	}
	for _, want := range []string{"attachments --cache-dir=/c --data-dir=/d --output=json", "doctor --cache-dir=/c --conf-dir=/n --data-dir=/d --output=json", "status --data-dir=/d --output=json", "version --output=json"} {
		if !slices.Contains(got, want) {
			t.Errorf("got %q, want %q among them", got, want)
		}
	}
	for _, words := range got {
		if name, _, _ := strings.Cut(words, " "); slices.Contains([]string{"repair", "upgrade", "bugreport"}, name) {
			t.Errorf("got %q, want commands that only read", words)
		}
	}
}
