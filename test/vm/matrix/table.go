package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// The table is in README.md of package vm between these lines.
const (
	tableBegin = "<!-- kernels: `make test-kernels` writes what is between these two lines -->"
	tableEnd   = "<!-- /kernels -->"
)

// row is the content for one kernel: a line of the table, and one below it.
type row struct {
	release string
	cells   string
	skipped string // missing features that made tests skip
}

// newRow combines the reports of all suites, in their order.
func newRow(reports []*report) row {
	var r row
	var attach, source string
	features := make(map[string]bool)
	counts := make([]string, len(reports))
	for i, report := range reports {
		if report.release != "" {
			r.release, attach, source = report.release, report.attach, report.source
		}
		for feature := range report.features {
			features[feature] = true
		}
		counts[i] = report.String()
	}
	r.cells = strings.Join(append([]string{attach, source}, counts...), " | ")
	r.skipped = strings.Join(slices.Sorted(maps.Keys(features)), ", ")
	return r
}

// updateTable replaces the row of a series in the file's table. The other rows stay, unless their kernel
// is no longer listed.
func updateTable(file string, all []string, series string, r row) error {
	if r.release == "" {
		return fmt.Errorf("%s: no release in the output of kernel %s: its row is unchanged", file, series)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(text), tableBegin)
	old, tail, ok2 := strings.Cut(rest, tableEnd)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no lines %q and %q", file, tableBegin, tableEnd)
	}
	rows := parseTable(old)
	rows = slices.DeleteFunc(rows, func(r row) bool { return r.isOf(series) })
	rows = append(rows, r)
	return os.WriteFile(file, []byte(head+tableBegin+"\n\n"+formatTable(all, rows)+"\n"+tableEnd+tail), 0o644)
}

// isOf reports whether the row's kernel belongs to a series: 6.1.0-56-amd64 belongs to 6.1, 6.12.1 does not.
func (r row) isOf(series string) bool { return strings.HasPrefix(r.release, series+".") }

// skippedPrefix starts the lines below the table.
const skippedPrefix = "- skipped on "

func formatTable(all []string, rows []row) string {
	titles := []string{"kernel", "attached by", "source address by"}
	for _, s := range suites {
		titles = append(titles, s.title)
	}
	table := "| " + strings.Join(titles, " | ") + " |\n" + strings.Repeat("|---", len(titles)) + "|\n"
	below := ""
	for _, series := range all {
		for _, r := range rows {
			if !r.isOf(series) {
				continue
			}
			table += fmt.Sprintf("| %s | %s |\n", r.release, r.cells)
			if r.skipped != "" {
				below += fmt.Sprintf("%s%s: %s\n", skippedPrefix, r.release, r.skipped)
			}
		}
	}
	return table + strings.TrimSuffix("\n"+below, "\n") + "\n"
}

// parseTable parses the output of formatTable.
func parseTable(text string) []row {
	var rows []row
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if below, ok := strings.CutPrefix(line, skippedPrefix); ok {
			release, skipped, _ := strings.Cut(below, ": ")
			if i := slices.IndexFunc(rows, func(r row) bool { return r.release == release }); i >= 0 {
				rows[i].skipped = skipped
			}
			continue
		}
		release, cells, ok := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(line, "| "), " |"), " | ")
		if ok && release != "kernel" {
			rows = append(rows, row{release: release, cells: cells})
		}
	}
	return rows
}
