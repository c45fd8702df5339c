package main

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const exampleConflist = "../../cmd/ebpfnet/example.conflist"

// TestDemo runs all of it, and testenv.Main then looks for what it leaves behind.
func TestDemo(t *testing.T) {
	var out strings.Builder
	m := &testenv.Machine{Name: "demo"}
	err := m.Protect(func() error { return run(m, &out, exampleConflist) })
	// Only the end of its process removes the demo's datapath.
	if err := errors.Join(err, m.CleanUp(), os.RemoveAll(loader.Root)); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	for _, want := range []string{
		"✓ pod-a → 10.84.0.3:80 pod-b replies and sees 10.84.0.2\n",
		"✓ pod-a → [2001:db8:1::2]:80 outside replies and sees 2001:db8:1::1\n",
		"✓ outside → 192.0.2.1:8080 pod-c replies and sees 192.0.2.2\n",
		"✓ node → 127.0.0.1:8080 pod-c replies and sees 10.84.0.1\n",
		"✓ pod-c → [2001:db8:1::1]:8080 pod-c replies and sees fd00:84::1\n",
		"✓ endpoints entries: 6,", "✓ host_ports entries: 4,", "✓ leftovers none", "✓ outside → 192.0.2.1:8080 no reply\n",
	} {
		if !strings.Contains(folded(out.String()), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if lines := strings.Count(out.String(), "\n"); lines > 50 {
		t.Errorf("%d lines are more than a screenful", lines)
	}
}

// folded has one space where the columns have several.
func folded(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(line), " ")
	}
	return strings.Join(lines, "\n")
}
