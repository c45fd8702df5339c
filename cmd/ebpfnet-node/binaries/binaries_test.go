package binaries

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestInstall copies what differs, while the old one runs, and removes what it has copied alone.
func TestInstall(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write := func(dir, name, content string, mode fs.FileMode) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		write(from, name, "new "+name, 0o700)
	}
	write(to, "ebpfnet", "old", 0o600)
	write(to, "bridge", "another's", 0o700)
	old, err := os.Open(filepath.Join(to, "ebpfnet"))
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	var before fs.FileInfo
	for i := range 2 {
		if err := Install(from, to); err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			content, err := os.ReadFile(filepath.Join(to, name))
			info, _ := os.Stat(filepath.Join(to, name))
			if err != nil || string(content) != "new "+name || info.Mode() != 0o755 {
				t.Errorf("%s: got %q, mode %v (%v), want the new one, mode 0755", name, content, info.Mode(), err)
			}
		}
		after, err := os.Stat(filepath.Join(to, "ebpfnet"))
		if err != nil || i > 0 && !os.SameFile(before, after) {
			t.Errorf("got another file (%v), want the same one to be left alone", err)
		}
		before = after
		if err := os.Chmod(filepath.Join(to, "ebpfnet"), 0o600); err != nil { // which is fixed
			t.Fatal(err)
		}
	}
	content := make([]byte, 10)
	if n, _ := old.Read(content); string(content[:n]) != "old" {
		t.Errorf("one that runs: got %q, want the old one", content[:n])
	}
	for range 2 {
		if err := Remove(to); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(to); len(left) != 1 || left[0].Name() != "bridge" {
		t.Errorf("got files %v, want another's alone", left)
	}
}

// TestInstallFails names the plugin, and leaves nothing.
func TestInstallFails(t *testing.T) {
	to := t.TempDir()
	if err := Install(t.TempDir(), to); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without plugins: got %v, want %v", err, fs.ErrNotExist)
	}
	from := t.TempDir()
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(from, name), []byte(name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(to, "ebpfnet"), 0o700); err != nil { // a file cannot replace it
		t.Fatal(err)
	}
	if err := Install(from, to); err == nil {
		t.Error("onto a directory: got no error, want one")
	}
	if left, _ := os.ReadDir(to); len(left) != 1 {
		t.Errorf("got files %v, want only the directory", left)
	}
}
