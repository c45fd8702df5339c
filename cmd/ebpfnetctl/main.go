// Command ebpfnetctl shows an operator what ebpfnet has on this host, and changes it. Commands that
// are nouns only read; those that are verbs change something and print what.
//
// It may import bpf, loader, loader/rtnl, maps, plugin/config, plugin/link, plugin/operator and show.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

//go:embed usage.txt
var usage string

// lockTimeout bounds a command's wait for locks.
const lockTimeout = 20 * time.Second

// options are the flags of a command, and the words after them.
type options struct {
	json    bool
	yes     bool
	hook    bool
	dataDir string
	words   []string
}

// command is a command with the flags that it has.
type command struct {
	run                           func(context.Context, io.Writer, options) error
	hasOutput, hasYes, hasDataDir bool
	hasHook, hasWords             bool
}

var commands = map[string]command{
	"status":      {run: printStatus, hasOutput: true},
	"attachments": {run: printAttachments, hasOutput: true, hasDataDir: true},
	"version":     {run: printVersion, hasOutput: true},
	"load":        {run: load},
	"upgrade":     {run: upgrade, hasOutput: true},
	"repair":      {run: repair, hasOutput: true, hasDataDir: true, hasHook: true},
	"set":         {run: set, hasDataDir: true, hasWords: true},
	"unload":      {run: unload, hasYes: true, hasDataDir: true},
}

// argumentError reports wrong arguments.
type argumentError struct{ error }

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 || args[0] == "help" || args[0] == "--help" || args[0] == "-h" {
		io.WriteString(stdout, usage)
		return 0
	}
	err := runCommand(args[0], args[1:], stdout)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, flag.ErrHelp):
		io.WriteString(stdout, usage)
		return 0
	case errors.As(err, new(argumentError)):
		printf(stderr, "ebpfnetctl: %v (`ebpfnetctl help` lists the commands)\n", err)
		return 2
	default:
		printf(stderr, "ebpfnetctl: %v\n", err)
		return 1
	}
}

func runCommand(name string, args []string, stdout io.Writer) error {
	c, ok := commands[name]
	if !ok {
		return argumentError{fmt.Errorf("no such command: %s", name)}
	}
	o, err := c.parse(name, args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
	defer cancel()
	return c.run(ctx, stdout, o)
}

// parse accepts only the flags that the command has, so that none is ignored.
func (c command) parse(name string, args []string) (o options, err error) {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard) // run prints errors and the usage
	output := "text"
	if c.hasOutput {
		flags.StringVar(&output, "o", output, "text or json")
	}
	if c.hasYes {
		flags.BoolVar(&o.yes, "yes", false, "do it")
	}
	if c.hasHook {
		flags.BoolVar(&o.hook, "hook", false, "follow an event of a network manager")
	}
	if c.hasDataDir {
		flags.StringVar(&o.dataDir, "data-dir", "", "dataDir of the networks")
	}
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		return o, err
	} else if err != nil {
		return o, argumentError{fmt.Errorf("%s: %w", name, err)}
	}
	if output != "text" && output != "json" {
		return o, argumentError{fmt.Errorf("%s: -o %s: expected text or json", name, output)}
	}
	if flags.NArg() > 0 && !c.hasWords {
		return o, argumentError{fmt.Errorf("%s: unexpected argument %q", name, flags.Arg(0))}
	}
	o.json, o.words = output == "json", flags.Args()
	return o, nil
}

// printf prints all text. The format is ours; its arguments can be from outside.
func printf(to io.Writer, format string, args ...any) {
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

// printJSON prints a value indented.
func printJSON(to io.Writer, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err == nil {
		_, err = to.Write(append(show.JSON(text), '\n'))
	}
	return err
}
