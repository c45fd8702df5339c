package main

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// table is a Markdown table with aligned columns.
type table struct {
	rows [][]string // the first has the titles
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) String() string {
	if len(t.rows) == 0 {
		return ""
	}
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var out strings.Builder
	for i, row := range t.rows {
		for j, cell := range row {
			out.WriteString("| " + cell + strings.Repeat(" ", widths[j]-utf8.RuneCountInString(cell)) + " ")
		}
		out.WriteString("|\n")
		if i > 0 {
			continue
		}
		for _, width := range widths {
			out.WriteString("|" + strings.Repeat("-", width+2))
		}
		out.WriteString("|\n")
	}
	return out.String()
}

// ratio formats a ratio with three significant digits.
func ratio(value float64) string {
	if value >= 10 {
		return fmt.Sprintf("%.1f", value)
	}
	return fmt.Sprintf("%.2f", value)
}

// String returns the median with the quartiles.
func (s spread) String() string {
	return fmt.Sprintf("%s (%s–%s)", ratio(s.Median), ratio(s.Low), ratio(s.High))
}

// amount formats a number with an SI prefix.
func amount(value float64) string {
	switch {
	case value >= 1e9:
		return fmt.Sprintf("%.2f G", value/1e9)
	case value >= 1e6:
		return fmt.Sprintf("%.2f M", value/1e6)
	case value >= 1e3:
		return fmt.Sprintf("%.1f k", value/1e3)
	}
	return fmt.Sprintf("%.0f", value)
}
