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

// TestBugreportNouns wants the nouns without an argument, with the flags that they share with it.
func TestBugreportNouns(t *testing.T) {
	cmd, _, err := newRoot().Find([]string{"bugreport"})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.ParseFlags([]string{"--data-dir", "/d", "--cache-dir", "/c", "--conf-dir", "/n"}); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, words := range nouns(cmd) {
		got = append(got, strings.Join(words, " "))
	}
	for _, want := range []string{"attachments --data-dir=/d", "diff --cache-dir=/c --data-dir=/d", "doctor --cache-dir=/c --conf-dir=/n --data-dir=/d", "status", "version"} {
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
