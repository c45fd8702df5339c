package nodestate

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// TestCheck lets an ADD pass only with the agent's word, and says why it does not.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct{ content, want string }{
		"synced":             {`{"node": "a", "synced": "2026-01-02T03:04:05Z"}`, ""},
		"synced, and failed": {`{"node": "a", "synced": "2026-01-02T03:04:05Z", "error": "connection refused"}`, ""},
		"never":              {`{"node": "a", "error": "the API server has not listed the nodes yet"}`, "since boot: the API server has not listed the nodes yet"},
		"cut":                {`{"node": "a", "synced": "2026`, "unexpected end of JSON input"},
		"too long":           {strings.Repeat(" ", 1<<16) + `{"synced": "2026-01-02T03:04:05Z"}`, "unexpected end of JSON input"},
		"no file":            {"", "is its pod of this node running?"},
	} {
		path := filepath.Join(dir, name)
		if test.content != "" {
			if err := os.WriteFile(path, []byte(test.content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		err := Check(path)
		switch {
		case test.want == "" && err != nil:
			t.Errorf("%s: got error %v, want none", name, err)
		case test.want != "" && (!errors.Is(err, ErrNotSynced) || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: got error %v, want %q", name, err, test.want)
		}
	}
}

// TestWrite is read as it was written, also into a directory that is not there yet.
func TestWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "node.json")
	for _, state := range []State{{Node: "a", Error: "why"}, {Node: "a", Synced: time.Unix(1_700_000_000, 0).UTC()}} {
		if err := Write(path, state); err != nil {
			t.Fatal(err)
		}
		if got, err := Read(path); err != nil || got != state {
			t.Errorf("got %+v (%v), want %+v", got, err, state)
		}
	}
}

// TestPeers are read as they were written.
func TestPeers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.json")
	if _, err := ReadPeers(path); err != nil {
		t.Errorf("before: got error %v, want %v", err, fs.ErrNotExist)
	}
	want := Peers{
		Peers:   []Peer{{"b", netip.MustParsePrefix("10.244.2.0/24"), time.Unix(1_700_000_000, 0).UTC()}},
		Skipped: []Skipped{{"c", "nonsense", "it is not a prefix"}},
	}
	if err := WritePeers(path, want); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadPeers(path); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v (%v), want %+v", got, err, want)
	}
}

// TestRulesFile reads rules once, and again after an error or a change.
func TestRulesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.json")
	var file RulesFile
	read := func() int {
		t.Helper()
		rules, err := file.Read(path)
		if err != nil {
			t.Error(err)
		}
		return len(rules.Rules)
	}
	if got := read(); got != 0 {
		t.Errorf("without a file: got %d rules, want none", got)
	}
	if err := os.WriteFile(RulesOf(path), []byte(`{"rules": [{"name": `), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if rules, err := file.Read(path); err == nil {
			t.Errorf("a file that is cut: got %+v, want an error", rules)
		}
	}
	for _, want := range []int{1, 2} {
		if err := WriteRules(path, Rules{Rules: make([]ObjectRule, want)}); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if got := read(); got != want {
				t.Errorf("got %d rules, want %d", got, want)
			}
		}
	}
}

// TestReplace leaves one file, and an equal one alone.
func TestReplace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "10-ebpfnet.conflist")
	for i, test := range []struct {
		content string
		changed bool
	}{{"a", true}, {"a", false}, {"b", true}} {
		changed, err := Replace(path, []byte(test.content))
		if got, _ := os.ReadFile(path); err != nil || changed != test.changed || string(got) != test.content {
			t.Errorf("write %d: got %q, changed %v (%v), want %q, %v", i, got, changed, err, test.content, test.changed)
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o644 {
		t.Errorf("got mode %v (%v), want 0644", info.Mode(), err)
	}
	if err := os.WriteFile(filepath.Join(dir, ".10-ebpfnet.conflist.new"), []byte("of one that was killed"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Replace(path, []byte("c")); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("got files %v, want one", left)
	}
}

// TestReplaceFails leaves nothing behind.
func TestReplaceFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "10-ebpfnet.conflist")
	if err := os.Mkdir(path, 0o700); err != nil { // a file cannot replace it
		t.Fatal(err)
	}
	if changed, err := Replace(path, []byte("a")); err == nil || changed {
		t.Errorf("onto a directory: got changed %v, error %v, want an error", changed, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("got files %v, want only the directory", left)
	}
	if _, err := Replace(filepath.Join(dir, "missing", "x"), nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("into no directory: got error %v, want %v", err, fs.ErrNotExist)
	}
}
