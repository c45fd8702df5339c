// Package output prints the results of ebpfnetctl's commands: tables and pages for a person, JSON, YAML
// and names for programs. Everything that a command prints on stdout goes through a Printer, which escapes
// control characters in text from outside.
package output

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// Format is the value of -o.
type Format = string

// The formats.
const (
	Text Format = "text" // for a person
	Wide Format = "wide" // for a person, with all columns
	JSON Format = "json"
	YAML Format = "yaml"
	Name Format = "name" // one name a line
)

// Flags are the flags that choose how a command prints.
type Flags struct {
	Format    Format
	NoHeaders bool
}

// AddToRead adds the flags that all read commands have.
func (f *Flags) AddToRead(flags *pflag.FlagSet) {
	f.add(flags, Text, Wide, JSON, YAML, Name)
	flags.BoolVar(&f.NoHeaders, "no-headers", false, "print no heading, and nothing if there is nothing")
}

// AddToWrite adds the flag of a write command that reports what it has done.
func (f *Flags) AddToWrite(flags *pflag.FlagSet) { f.add(flags, Text, JSON, YAML) }

func (f *Flags) add(flags *pflag.FlagSet, known ...string) {
	f.Format = Text
	flags.VarP(&Choice{&f.Format, known}, "output", "o", "print as `FORMAT`: "+list(known))
}

// ForPrograms reports whether the format is for programs.
func (f Flags) ForPrograms() bool { return f.Format == JSON || f.Format == YAML }

// Choice is a flag that has one of a few values. It implements [pflag.Value].
type Choice struct {
	Value *string
	Known []string
}

func (c *Choice) String() string { return *c.Value }

// Type implements [pflag.Value].
func (c *Choice) Type() string { return "" }

// Set implements [pflag.Value].
func (c *Choice) Set(text string) error {
	if !slices.Contains(c.Known, text) {
		return fmt.Errorf("expected %s", list(c.Known))
	}
	*c.Value = text
	return nil
}

// Formats returns the values that a command's -o can have.
func Formats(flags *pflag.FlagSet) []string {
	if flag := flags.Lookup("output"); flag != nil {
		return flag.Value.(*Choice).Known
	}
	return nil
}

func list(names []string) string {
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}
