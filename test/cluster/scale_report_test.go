package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The figures are in SCALE.md between these lines.
const (
	figuresBegin = "<!-- scale: `make scale` writes what is between these two lines -->"
	figuresEnd   = "<!-- /scale -->"
)

// report writes the table into a directory's SCALE.md.
func report(t *testing.T, dir string, rows []scaleRow) {
	t.Helper()
	file := filepath.Join(dir, "SCALE.md")
	text := testenv.ReadFile(t, file)
	head, rest, found := strings.Cut(string(text), figuresBegin)
	_, tail, foundEnd := strings.Cut(rest, figuresEnd)
	if !found || !foundEnd {
		t.Fatalf("%s has no lines %q and %q", file, figuresBegin, figuresEnd)
	}
	text = []byte(head + figuresBegin + "\n\n" + table(rows) + "\n" + conditions(t) + "\n" + figuresEnd + tail)
	testenv.Must(t, os.WriteFile(file, text, 0o644))
}

func conditions(t *testing.T) string {
	t.Helper()
	release := testenv.ReadFile(t, "/proc/sys/kernel/osrelease")
	load := testenv.ReadFile(t, "/proc/loadavg")
	kernel, _, _ := strings.Cut(strings.TrimSpace(string(release)), "-")
	return fmt.Sprintf("Linux %s, %d CPUs, %s; load in the end %s, of which the test's API server is a part.\n",
		kernel, runtime.NumCPU(), time.Now().UTC().Format(time.DateOnly), strings.Fields(string(load))[0])
}

// measures are the columns of the table.
var measures = []struct {
	head string
	text func(scaleRow) string
}{
	{"time", scaleRow.time},
	{"CPU", scaleRow.usage},
	{"memory (RSS) at its peak", func(r scaleRow) string { return mebibytes(r.peak) }},
	{"from the API server", func(r scaleRow) string { return mebibytes(r.sent) }},
}

// time is of no interest where it was chosen.
func (r scaleRow) time() string {
	if r.event == eventIdle {
		return ""
	}
	return fmt.Sprintf("%.1f s", r.took.Seconds())
}

func (r scaleRow) usage() string {
	if r.event == eventIdle {
		return fmt.Sprintf("%.2f %%", 100*r.cpu.Seconds()/r.took.Seconds())
	}
	return fmt.Sprintf("%.2f s", r.cpu.Seconds())
}

func mebibytes(bytes int64) string { return fmt.Sprintf("%d MiB", (bytes+1<<19)>>20) }

func table(rows []scaleRow) string {
	var out strings.Builder
	out.WriteString("| other nodes | what happens |")
	for _, m := range measures {
		out.WriteString(" " + m.head + " |")
	}
	out.WriteString("\n|---|---|" + strings.Repeat("---|", len(measures)) + "\n")
	before := 0
	for _, row := range rows {
		nodes := ""
		if row.nodes != before {
			nodes = testenv.Thousands(row.nodes)
		}
		before = row.nodes
		fmt.Fprintf(&out, "| %s | %s |", nodes, row.event)
		for _, m := range measures {
			out.WriteString(" " + m.text(row) + " |")
		}
		out.WriteString("\n")
	}
	return out.String()
}
