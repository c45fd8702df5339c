package output

import (
	"cmp"
	"strings"
	"text/tabwriter"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Table lists things of one kind.
type Table[T any] struct {
	Columns []Column[T]
	Name    func(T) string // for -o name
	None    string         // a sentence for a person, where there are none
}

// Column is a column of a table.
type Column[T any] struct {
	Head string // in capitals
	Text func(T) string
	Wide bool // only with -o wide
}

// Print prints a list in the format that the flags choose.
func (t Table[T]) Print(p *Printer, items []T) error {
	switch p.Format {
	case JSON, YAML:
		return p.Value(append([]T{}, items...)) // programs iterate over an empty list
	case Name:
		for _, item := range items {
			p.Printf("%s\n", t.Name(item))
		}
	default:
		t.PrintRows(p, items)
	}
	return nil
}

// PrintRows prints a list for a person.
func (t Table[T]) PrintRows(p *Printer, items []T) {
	if len(items) == 0 && t.None != "" {
		if !p.NoHeaders {
			p.Printf("%s\n", t.None)
		}
		return
	}
	const gap = 2 // between two columns

	rows := tabwriter.NewWriter(p.to, 0, 0, gap, ' ', 0)
	printRow := func(text func(Column[T]) string) {
		var cells []string
		for _, c := range t.Columns {
			if !c.Wide || p.Format == Wide {
				cells = append(cells, cmp.Or(show.Text(text(c)), "-")) // each line has as many words as columns
			}
		}
		Printf(rows, "%s\n", Raw(strings.Join(cells, "\t")))
	}
	if !p.NoHeaders {
		printRow(func(c Column[T]) string { return c.Head })
	}
	for _, item := range items {
		printRow(func(c Column[T]) string { return c.Text(item) })
	}
	_ = rows.Flush() // File keeps the error
}
