package output

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Printer prints what one command has found.
type Printer struct {
	Flags
	to    io.Writer
	width int // of the terminal; 0: no terminal, and nothing is cut
	color bool
}

// File is a file that remembers what could not be written, for those who print and do not ask.
type File struct {
	*os.File
	Err error // the first
}

// Write implements io.Writer.
func (f *File) Write(text []byte) (int, error) {
	n, err := f.File.Write(text)
	if f.Err == nil {
		f.Err = err
	}
	return n, err
}

// New returns a printer. Only a terminal gets colors, and none where NO_COLOR is set.
func New(to io.Writer, flags Flags) *Printer {
	p := &Printer{Flags: flags, to: to}
	if p.width, _ = TerminalSize(to); p.width > 0 {
		p.color = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	}
	return p
}

// On returns a printer like p for a screen that is drawn elsewhere, as wide as a terminal.
func (p *Printer) On(other io.Writer, columns int) *Printer {
	copied := *p
	copied.to, copied.width = other, columns
	return &copied
}

// IsTerminal returns whether p prints on a terminal.
func (p *Printer) IsTerminal() bool { return p.width > 0 }

// WithoutHeaders returns a printer like p, for a table without headings.
func (p *Printer) WithoutHeaders() *Printer {
	copied := *p
	copied.NoHeaders = true
	return &copied
}

// TerminalSize returns the columns and lines of a terminal, and zeros where to is none.
func TerminalSize(to io.Writer) (columns, lines int) {
	const usualColumns, usualLines = 80, 24

	file, ok := to.(interface{ Fd() uintptr })
	if !ok {
		return 0, 0
	}
	if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err != nil {
		return 0, 0
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 { // a serial console does not know
		return usualColumns, usualLines
	}
	return int(size.Col), int(size.Row)
}

// Printf prints text. The format is ours; its arguments can be from outside.
func (p *Printer) Printf(format string, args ...any) { Printf(p.to, format, args...) }

// Printf is for what no Printer prints: errors, and what is waited for.
func Printf(to io.Writer, format string, args ...any) {
	for i, arg := range args {
		switch value := arg.(type) {
		case string:
			args[i] = show.Text(value)
		case error:
			args[i] = show.Message(value.Error())
		}
	}
	fmt.Fprintf(to, format, args...) //permit:fmt.Fprintf
}

// Color is a color of text on a terminal: the number of a Select Graphic Rendition sequence.
type Color int

// The colors. Each says what its word says as well, for those who do not see it.
const (
	Plain  Color = 0
	Bold   Color = 1
	Red    Color = 31 // something is wrong
	Green  Color = 32 // it is right
	Yellow Color = 33 // it may be wrong
)

// Paint returns text in a color, fit for a terminal.
func (p *Printer) Paint(color Color, text string) Painted {
	text = show.Text(text)
	if !p.color || color == Plain {
		return Painted(text)
	}
	return Painted(fmt.Sprintf("\x1b[%dm%s\x1b[0m", color, text))
}

// Painted is text that Printf prints as it is.
type Painted string

// IsWord returns whether a shell takes text for one word that means itself, and a terminal shows all of
// it. A name that a stranger has chosen is offered to a shell only then.
func IsWord(text string) bool {
	isSafe := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@+%,=", r)
	}
	return text != "" && text[0] != '-' && !strings.ContainsFunc(text, func(r rune) bool { return !isSafe(r) })
}
