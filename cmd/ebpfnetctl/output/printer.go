package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

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

// Document prints a thing that is no list: as text, as a value for programs, or as its name.
func (p *Printer) Document(value any, name string, text func()) error {
	switch p.Format {
	case JSON, YAML:
		return p.Value(value)
	case Name:
		p.Printf("%s\n", name)
	default:
		text()
	}
	return nil
}

// Value prints a value for programs, as JSON or YAML. YAML has the fields of the JSON.
func (p *Printer) Value(value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err == nil && p.Format == YAML {
		text, err = yamlOf(text)
	}
	if err != nil {
		return err
	}
	_, err = p.to.Write(append(show.JSON(bytes.TrimRight(text, "\n")), '\n'))
	return err
}

// Line prints a value as one line of JSON, for a command that prints one after another.
func (p *Printer) Line(value any) error {
	if p.Format == YAML {
		p.Printf("---\n")
		return p.Value(value)
	}
	text, err := json.Marshal(value)
	if err == nil {
		_, err = p.to.Write(append(show.JSON(text), '\n'))
	}
	return err
}

// yamlOf converts JSON to YAML. Hidden characters that YAML does not escape, such as U+202E, become their escape.
func yamlOf(text []byte) ([]byte, error) {
	var value any
	if err := yaml.Unmarshal(escape(text), &value); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	err := encoder.Encode(value)
	return out.Bytes(), err
}

// escape escapes what JSON may contain as it is, and YAML may not. YAML knows no pairs of surrogates.
func escape(text []byte) (escaped []byte) {
	for _, r := range string(text) {
		if r != '\n' && r <= 0xffff && !strconv.IsPrint(r) {
			escaped = fmt.Appendf(escaped, `\u%04x`, r)
			continue
		}
		escaped = utf8.AppendRune(escaped, r)
	}
	return escaped
}
