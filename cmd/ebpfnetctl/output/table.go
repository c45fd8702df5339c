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
	// Wraps: a sentence, which is continued in the next line.
	Wraps bool
	// Ends with what matters, such as a port, so it is cut in the middle.
	Ends  bool
	Color func(T) Color
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
	rows := rowsOf(columns, items, !p.NoHeaders)
	widths := widthsOf(rows)
	if p.width > 0 && p.Format != Wide {
		isElastic := func(i int) bool { return columns[i].Elastic }
		isSentence := func(i int) bool { return columns[i].Wraps }
		isText := func(i int) bool { return !columns[i].Right }
		shrink(widths, p.width, 40, isSentence)
		shrink(widths, p.width, len("CONTAINER"), isElastic)
		shrink(widths, p.width, 20, isSentence)
		shrink(widths, p.width, 4, isText)
	}
	for _, r := range rows {
		for _, texts := range wrap(columns, r.texts, widths) {
			var line strings.Builder
			for i, text := range texts {
				text = cut(text, widths[i], columns[i].Ends)
				line.WriteString(p.cell(text, widths[i], columns[i].Right, i == len(texts)-1, r.color(i)))
			}
			p.Printf("%s\n", Painted(line.String()))
		}
	}
}

// gap is between two columns.
const gap = 2

// cell returns a padded cell.
func (p *Printer) cell(text string, width int, right, last bool, color Color) string {
	pad := strings.Repeat(" ", width-utf8.RuneCountInString(text))
	painted := ""
	if text != "" {
		painted = string(p.Paint(color, text))
	}
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

// row is a line of a table, before it is fit to a terminal.
type row struct {
	texts []string
	color func(column int) Color
}

func rowsOf[T any](columns []Column[T], items []T, headers bool) (rows []row) {
	if headers {
		heads := row{color: func(int) Color { return Plain }}
		for _, c := range columns {
			heads.texts = append(heads.texts, c.Head)
		}
		rows = append(rows, heads)
	}
	for _, item := range items {
		r := row{color: func(i int) Color {
			if columns[i].Color == nil {
				return Plain
			}
			return columns[i].Color(item)
		}}
		for _, c := range columns {
			text := show.Text(c.Text(item))
			if text == "" {
				text = "-" // so that each line has as many words as columns
			}
			r.texts = append(r.texts, text)
		}
		rows = append(rows, r)
	}
	return rows
}

func widthsOf(rows []row) (widths []int) {
	for _, r := range rows {
		for i, text := range r.texts {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	return widths
}

// wrap continues a column that wraps in lines of their own.
func wrap[T any](columns []Column[T], texts []string, widths []int) (lines [][]string) {
	for i, c := range columns {
		if !c.Wraps {
			continue
		}
		for n, part := range breakWords(texts[i], widths[i]) {
			if n == len(lines) {
				lines = append(lines, make([]string, len(texts)))
			}
			lines[n][i] = part
		}
	}
	if lines == nil {
		return [][]string{texts}
	}
	for i, c := range columns {
		if !c.Wraps {
			lines[0][i] = texts[i]
		}
	}
	return lines
}

// breakWords breaks text at spaces into lines of a width; a longer word is cut later.
func breakWords(text string, width int) (lines []string) {
	line := ""
	for word := range strings.SplitSeq(text, " ") {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			lines = append(lines, line)
			line = ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(lines, line)
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

// cut cuts text to a number of characters, at its end or before its last ones.
func cut(text string, width int, keepEnd bool) string {
	const longestEnd = len(":65535")

	runes := []rune(text)
	if len(runes) <= width {
		return text
	}
	end := 0
	if keepEnd {
		end = min(longestEnd, width/2)
	}
	return string(runes[:width-1-end]) + "…" + string(runes[len(runes)-end:])
}
