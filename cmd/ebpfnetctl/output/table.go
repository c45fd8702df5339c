package output

import (
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Noun says how things of one kind are listed.
type Noun[T any] struct {
	Columns []Column[T]
	Name    func(T) string // for -o name
	None    string         // a sentence for a person, where there are none
}

// Column is a column of a table.
type Column[T any] struct {
	Head  string // in capitals
	Text  func(T) string
	Right bool // aligned to the right, and never cut: a number
	Wide  bool // in -o wide alone
	// Elastic columns are the first to be cut: those of names.
	Elastic bool
	Color   func(T) Color
}

// Print prints a list in the format that the flags choose.
func (n Noun[T]) Print(p *Printer, items []T) error {
	switch p.Format {
	case JSON, YAML:
		return p.Value(items)
	case Name:
		for _, item := range items {
			p.Printf("%s\n", n.Name(item))
		}
	default:
		n.Table(p, items)
	}
	return nil
}

// Table prints a list as a table.
func (n Noun[T]) Table(p *Printer, items []T) {
	if len(items) == 0 && n.None != "" {
		if !p.NoHeaders {
			p.Printf("%s\n", n.None)
		}
		return
	}
	columns := slices.Clone(n.Columns)
	if p.Format != Wide {
		columns = slices.DeleteFunc(columns, func(c Column[T]) bool { return c.Wide })
	}
	cells := cellsOf(columns, items, !p.NoHeaders)
	widths := widthsOf(cells)
	if p.width > 0 && p.Format != Wide {
		shrink(widths, p.width, 8, func(i int) bool { return columns[i].Elastic })
		shrink(widths, p.width, 4, func(i int) bool { return !columns[i].Right })
	}
	for row, texts := range cells {
		color := func(i int) Color {
			item := row
			if !p.NoHeaders {
				item--
			}
			if item < 0 || columns[i].Color == nil {
				return Plain
			}
			return columns[i].Color(items[item])
		}
		var line strings.Builder
		for i, text := range texts {
			line.WriteString(p.cell(text, widths[i], columns[i].Right, i == len(texts)-1, color(i)))
		}
		p.Printf("%s\n", Painted(line.String()))
	}
}

// gap is between two columns.
const gap = 2

// cell returns a padded cell.
func (p *Printer) cell(text string, width int, right, last bool, color Color) string {
	text = cut(text, width)
	pad := strings.Repeat(" ", width-utf8.RuneCountInString(text))
	painted := string(p.Paint(color, text))
	switch {
	case right && last:
		return pad + painted
	case right:
		return pad + painted + strings.Repeat(" ", gap)
	case last:
		return painted
	default:
		return painted + pad + strings.Repeat(" ", gap)
	}
}

func cellsOf[T any](columns []Column[T], items []T, headers bool) (rows [][]string) {
	if headers {
		var row []string
		for _, c := range columns {
			row = append(row, c.Head)
		}
		rows = append(rows, row)
	}
	for _, item := range items {
		var row []string
		for _, c := range columns {
			text := show.Text(c.Text(item))
			if text == "" {
				text = "-" // so that each line has as many words as columns
			}
			row = append(row, text)
		}
		rows = append(rows, row)
	}
	return rows
}

func widthsOf(rows [][]string) (widths []int) {
	for _, row := range rows {
		for i, text := range row {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	return widths
}

// shrink takes from the widest columns that may become narrower until a line fits.
func shrink(widths []int, width, narrowest int, may func(column int) bool) {
	for sum(widths)+gap*(len(widths)-1) > width {
		widest := -1
		for i := range widths {
			if may(i) && widths[i] > narrowest && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			return
		}
		widths[widest]--
	}
}

func sum(numbers []int) (all int) {
	for _, n := range numbers {
		all += n
	}
	return all
}

// cut cuts text to a number of characters.
func cut(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	return string([]rune(text)[:width-1]) + "…"
}
