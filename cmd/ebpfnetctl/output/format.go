// Package output prints the results of ebpfnetctl's commands: tables and pages for a person, JSON, YAML
// and names for programs. Everything that a command prints on stdout goes through a Printer, which escapes
// control characters in text from outside.
//
// It may import plugin/show.
package output

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// Format is the value of -o.
type Format string

// The formats.
const (
	Text Format = "text" // for a person
	Wide Format = "wide" // for a person, with all columns
	JSON Format = "json"
	YAML Format = "yaml"
	Name Format = "name" // one name a line
)

// The formats of read commands, and of write commands that report what they have done.
var (
	readFormats  = []Format{Text, Wide, JSON, YAML, Name}
	writeFormats = []Format{Text, JSON, YAML}
)

// Flags are the flags that choose how a command prints.
type Flags struct {
	Format    Format
	NoHeaders bool
}

// AddToRead adds the flags that all read commands have.
func (f *Flags) AddToRead(flags *pflag.FlagSet) {
	f.add(flags, readFormats)
	flags.BoolVar(&f.NoHeaders, "no-headers", false, "print no heading, and nothing if there is nothing")
}

// AddToWrite adds the flag of a write command that reports what it has done.
func (f *Flags) AddToWrite(flags *pflag.FlagSet) { f.add(flags, writeFormats) }

func (f *Flags) add(flags *pflag.FlagSet, known []Format) {
	f.Format = Text
	flags.VarP(&formatFlag{&f.Format, known}, "output", "o", "print as `FORMAT`: "+list(known))
}

// ForPrograms reports whether the format is for programs.
func (f Flags) ForPrograms() bool { return f.Format == JSON || f.Format == YAML }

// formatFlag implements [pflag.Value].
type formatFlag struct {
	value *Format
	known []Format
}

func (f *formatFlag) String() string { return string(*f.value) }

func (f *formatFlag) Type() string { return "FORMAT" }

func (f *formatFlag) Set(text string) error {
	if !slices.Contains(f.known, Format(text)) {
		return fmt.Errorf("expected %s", list(f.known))
	}
	*f.value = Format(text)
	return nil
}

// FormatNames returns the values that a command's -o can have, for completion.
func FormatNames(flags *pflag.FlagSet) (names []string) {
	flag := flags.Lookup("output")
	if flag == nil {
		return nil
	}
	format, ok := flag.Value.(*formatFlag)
	if !ok {
		return nil
	}
	for _, known := range format.known {
		names = append(names, string(known))
	}
	return names
}

func list(formats []Format) string {
	var names []string
	for _, format := range formats {
		names = append(names, string(format))
	}
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}
