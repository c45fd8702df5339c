package output

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Printer prints the result of one command.
type Printer struct {
	Flags
	to io.Writer
}

// File is a file that keeps the first error of writing, for callers that print without checking.
type File struct {
	*os.File
	Err error
}

// Write implements io.Writer.
func (f *File) Write(text []byte) (int, error) {
	n, err := f.File.Write(text)
	if f.Err == nil {
		f.Err = err
	}
	return n, err
}

// New returns a printer.
func New(to io.Writer, flags Flags) *Printer { return &Printer{Flags: flags, to: to} }

// Printf prints text. The format is ours; its arguments can be from outside.
func (p *Printer) Printf(format string, args ...any) { Printf(p.to, format, args...) }

// Printf prints what does not go through a Printer, such as errors.
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

// Raw is text that Printf prints as it is.
type Raw string

// IsWord reports whether a shell reads text as one literal word, all of which a terminal shows. Only such
// names are offered for completion, because others choose them.
func IsWord(text string) bool {
	isSafe := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_./:@+%,=", r)
	}
	return text != "" && text[0] != '-' && !strings.ContainsFunc(text, func(r rune) bool { return !isSafe(r) })
}
