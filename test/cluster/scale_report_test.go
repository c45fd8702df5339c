package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// The figures are in a README.md between these lines.
const (
	figuresBegin = "<!-- scale: `make scale` writes what is between these two lines -->"
	figuresEnd   = "<!-- /scale -->"
)

// report writes the table into a directory's README.md, and the chart beside it.
func report(t *testing.T, dir string, rows []scaleRow) {
	t.Helper()
	readme := filepath.Join(dir, "README.md")
	text, err := os.ReadFile(readme)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), figuresBegin)
	_, tail, foundEnd := strings.Cut(rest, figuresEnd)
	if !found || !foundEnd {
		t.Fatalf("%s has no lines %q and %q", readme, figuresBegin, figuresEnd)
	}
	text = []byte(head + figuresBegin + "\n\n" + table(rows) + "\n" + conditions(t) + "\n" + figuresEnd + tail)
	for file, content := range map[string][]byte{readme: text, filepath.Join(dir, "scale.svg"): []byte(chart(rows))} {
		if err := os.WriteFile(file, content, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func conditions(t *testing.T) string {
	t.Helper()
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	kernel, _, _ := strings.Cut(strings.TrimSpace(string(release)), "-")
	return fmt.Sprintf("Linux %s, %d CPUs, %s; load in the end %s, of which the test's API server is a part.\n",
		kernel, runtime.NumCPU(), time.Now().UTC().Format(time.DateOnly), strings.Fields(string(load))[0])
}

// measures are the columns of the table, and the panels of the chart.
var measures = []struct {
	head string
	of   func(scaleRow) float64
	text func(scaleRow) string
}{
	{"time", func(r scaleRow) float64 { return r.took.Seconds() }, scaleRow.time},
	{"CPU", func(r scaleRow) float64 { return r.cpu.Seconds() }, scaleRow.usage},
	{"memory (RSS) at its peak", func(r scaleRow) float64 { return float64(r.peak) }, func(r scaleRow) string { return mebibytes(r.peak) }},
	{"from the API server", func(r scaleRow) float64 { return float64(r.sent) }, func(r scaleRow) string { return mebibytes(r.sent) }},
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

func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}

func mebibytes(bytes int64) string { return fmt.Sprintf("%d MiB", (bytes+1<<19)>>20) }

func table(rows []scaleRow) string {
	var out strings.Builder
	out.WriteString("![time, CPU, memory and traffic of an agent when many nodes come and go](scale.svg)\n\n| other nodes | what happens |")
	for _, m := range measures {
		out.WriteString(" " + m.head + " |")
	}
	out.WriteString("\n|---|---|" + strings.Repeat("---|", len(measures)) + "\n")
	before := 0
	for _, row := range rows {
		nodes := ""
		if row.nodes != before {
			nodes = thousands(row.nodes)
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

// chart has a panel for each measure, with a bar for each row.
func chart(rows []scaleRow) string {
	const margin, label, width, bar, head, value = 16, 210, 260, 14, 30, 60 // in pixels

	height := margin + len(measures)*(head+len(rows)*bar) + margin
	var out strings.Builder
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11">`+"\n", margin+label+width+value+margin, height)
	fmt.Fprintf(&out, `<rect width="100%%" height="%d" fill="#fff"/>`+"\n", height)
	y := margin
	for _, m := range measures {
		fmt.Fprintf(&out, `<text x="%d" y="%d" font-weight="bold">%s</text>`+"\n", margin, y+head-12, m.head)
		y += head
		most := 0.0
		for _, row := range rows {
			if m.text(row) != "" {
				most = max(most, m.of(row))
			}
		}
		for _, row := range rows {
			if m.text(row) == "" {
				continue
			}
			length := m.of(row) / most * width
			fmt.Fprintf(&out, `<text x="%d" y="%d">%s: %s</text>`+"\n", margin, y+bar-4, thousands(row.nodes), row.event)
			fmt.Fprintf(&out, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="#1b9e4b"/>`+"\n", margin+label, y+2, length, bar-4)
			fmt.Fprintf(&out, `<text x="%.0f" y="%d">%s</text>`+"\n", margin+label+length+4, y+bar-4, m.text(row))
			y += bar
		}
	}
	out.WriteString("</svg>\n")
	return out.String()
}
