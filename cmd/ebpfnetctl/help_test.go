package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
)

// runIn runs ebpfnetctl in this process.
func runIn(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	code = run(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

// TestHelp reads the help of each command: it has examples, and fits a terminal.
func TestHelp(t *testing.T) {
	const columns = 80

	commands := append(newRoot().Commands(), newRoot())
	for _, command := range commands {
		commands = append(commands, command.Commands()...)
	}
	for _, command := range commands {
		args := strings.Fields(command.CommandPath())[1:]
		code, help, stderr := runIn(t, append([]string{"help"}, args...)...)
		if _, other, _ := runIn(t, append(args, "--help")...); code != exitGood || other != help {
			t.Errorf("help of %s: got exit code %d, %q%s; --help prints %q, want the same", command.CommandPath(), code, help, stderr, other)
		}
		if command.HasParent() && (!strings.Contains(help, "\nExamples:\n  "+command.CommandPath()) || command.Short == "" || command.Long == "") {
			t.Errorf("help of %s: want texts and examples:\n%s", command.Name(), help)
		}
		for _, child := range command.Commands() {
			if child.IsAvailableCommand() && !strings.Contains(help, child.Short) {
				t.Errorf("help of %s: want %s in it: %s", command.Name(), child.Name(), help)
			}
		}
		for line := range strings.Lines(help) {
			if n := utf8.RuneCountInString(strings.TrimSpace(line)); n > columns {
				t.Errorf("help of %s: got a line of %d columns, want at most %d: %s", command.Name(), n, columns, line)
			}
		}
	}
}

// TestSchemas wants a schema for each command that prints JSON, no other schema, and --no-headers of read commands.
func TestSchemas(t *testing.T) {
	names := schemaNames()
	for _, command := range newRoot().Commands() {
		formats := output.Formats(command.Flags())
		if slices.Contains(formats, "json") != slices.Contains(names, command.Name()) {
			t.Errorf("%s: got -o %q, and a schema: %v", command.Name(), formats, slices.Contains(names, command.Name()))
		}
		if reads := slices.Contains(formats, "name"); reads != (command.Flags().Lookup("no-headers") != nil) {
			t.Errorf("%s: a read command: %v; want --no-headers of these alone", command.Name(), reads)
		}
		names = slices.DeleteFunc(names, func(name string) bool { return name == command.Name() })
	}
	if len(names) > 0 {
		t.Errorf("schemas %q: want none without a command", names)
	}
	for _, name := range schemaNames() {
		_, text, _ := runIn(t, "schema", name)
		var schema struct{ Title string }
		if err := json.Unmarshal([]byte(text), &schema); err != nil || schema.Title != "ebpfnetctl "+name+" -o json" {
			t.Errorf("schema of %s: got title %q (%v)", name, schema.Title, err)
		}
	}
}

// TestNeedsRoot has a user call commands: what reads or changes the host says at once that it needs root's rights.
func TestNeedsRoot(t *testing.T) {
	effectiveUID = func() int { return 1000 }
	t.Cleanup(func() { effectiveUID = os.Geteuid })
	for command, want := range map[string]int{"status": exitError, "doctor": exitError, "policy explain a b": exitError, "repair": exitError, "version": exitGood, "help": exitGood} {
		if code, _, stderr := runIn(t, strings.Fields(command)...); code != want || strings.Contains(stderr, "run it as root") != (want == exitError) {
			t.Errorf("%s: got exit code %d and %q, want %d", command, code, stderr, want)
		}
	}
}

// TestUsage wants exit code 2, nothing on stdout, and what is expected.
func TestUsage(t *testing.T) {
	effectiveUID = func() int { return 0 }
	t.Cleanup(func() { effectiveUID = os.Geteuid })
	for want, args := range map[string][]string{
		"did you mean status? (`ebpfnetctl help` lists the commands)": {"stauts"},
		"no such command: x": {"help", "x"},
		`\x1b[2J`:            {"\x1b[2J"},
		"expected text, wide, json, yaml or name":                               {"status", "-o", "xml"},
		"expected text, json or yaml":                                           {"upgrade", "-o", "name"},
		`status: unexpected argument "all"`:                                     {"status", "all"},
		"unknown flag: --verbose":                                               {"status", "--verbose"},
		"expected one of attachments":                                           {"schema", "../schema/status"},
		"expected NETWORK[/CONTAINER[/INTERFACE]]":                              {"set", "pods"},
		`colour "red"`:                                                          {"set", "pods", "colour=red"},
		"same-network":                                                          {"set", "pods", "ingressPolicy=closed"},
		"expected a file with a policy, or none":                                {"set", "pods", "policy=/nowhere"},
		"true or false":                                                         {"set", "pods", "antiSpoof=maybe"},
		`attachments: unexpected argument "b"`:                                  {"attachments", "a", "b"},
		"unload: unknown shorthand flag: 'o' in -o":                             {"unload", "-o", "json"},
		"(see `ebpfnetctl help policy explain`)":                                {"policy", "explain", "web"},
		"unload: unknown flag: --force":                                         {"unload", "--force"},
		"flag needs an argument: --data-dir":                                    {"repair", "--data-dir"},
		"version: unexpected argument \"\\\"\" (see `ebpfnetctl help version`)": {"version", `"`},
	} {
		code, stdout, stderr := runIn(t, args...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("ebpfnetctl %q: got exit code %d, stdout %q, stderr %q; want 2, nothing, %q", args, code, stdout, stderr, want)
		}
	}
}

// TestCompletion completes words and flags, also of the commands of a command.
func TestCompletion(t *testing.T) {
	for args, want := range map[string]string{
		"status":                    ":4\n", // no files
		"status -o":                 "text\nwide\njson\nyaml\nname\n:4\n",
		"policy explain -o":         "text\njson\nyaml\n:4\n",
		"policy preview -o":         "text\njson\nyaml\n:4\n",
		"policy preview -f a.yaml":  ":4\n",
		"policy explain --help":     ":4\n",
		"policy preview --delete a": ":4\n",
	} {
		words := append(append([]string{"__complete"}, strings.Fields(args)...), "")
		if code, stdout, _ := runIn(t, words...); code != exitGood || stdout != want {
			t.Errorf("%s: got exit code %d, %q, want %q", args, code, stdout, want)
		}
	}
}

func TestVersion(t *testing.T) {
	for format, want := range map[string]string{
		"text": fmt.Sprintf("devel, revision %d, build %016x, ABI %d\n", bpf.Revision, bpf.Build, loader.ABI),
		"json": fmt.Sprintf("\"revision\": %d,\n  \"build\": \"%016x\"", bpf.Revision, bpf.Build),
		"yaml": fmt.Sprintf("abi: %d\n", loader.ABI),
	} {
		if code, stdout, _ := runIn(t, "version", "-o", format); code != exitGood || !strings.Contains(stdout, want) {
			t.Errorf("version -o %s: got exit code %d, %q, want %q", format, code, stdout, want)
		}
	}
}
