package conformance

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// verbs have a schema, too. trace is one: what it asks is tried, and nothing is listed.
var verbs = []string{"migrate", "repair", "trace", "upgrade"}

// TestCtlNouns holds each noun to what all nouns promise: formats, headings, colors, completion, and exit codes.
func TestCtlNouns(t *testing.T) {
	s := newScript(t)
	args := map[string][]string{
		"diff":   {"--cache-dir", s.runtime.CacheDir},
		"doctor": {"--cache-dir", s.runtime.CacheDir},
		"top":    {"--interval", "100ms", "-n", "1"},
	}
	_, list, _ := s.host.ctl(t, "schema")
	nouns := slices.DeleteFunc(strings.Fields(list), func(name string) bool { return slices.Contains(verbs, name) })
	if len(nouns) < 8 {
		t.Fatalf("got nouns %q, want them all", nouns)
	}
	for _, noun := range nouns {
		if code, stdout, stderr := s.host.ctl(t, append([]string{noun}, args[noun]...)...); code == 1 && (stdout != "" || !strings.Contains(stderr, "not loaded")) {
			t.Errorf("%s before the first ADD: got %q, %q; want nothing, and why", noun, stdout, stderr)
		} else if code != 1 && noun != "doctor" && noun != "version" {
			t.Errorf("%s before the first ADD: got exit code %d, want 1", noun, code)
		}
	}
	web := s.runtime.AddPod(t, "web", map[string]any{"portMappings": []map[string]any{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}})
	for _, family := range testenv.Families {
		remote := netip.AddrPortFrom(family.Outside, 7001)
		if err := s.ask(s.host.Outside, web.Namespace, "udp", remote, remote); err != nil {
			t.Fatal(err)
		}
	}
	if err := web.SendFrames(testenv.PodIfName, make([]byte, 60)); err != nil { // a forged one, for drops
		t.Fatal(err)
	}
	if err := s.host.Node.SetSysctl("net/ipv4/ip_forward", "0"); err != nil { // for diff and doctor to find
		t.Fatal(err)
	}
	withDatapath(t, s.host, func(datapath *loader.Datapath) error {
		node := maps.Node{Prefix: netip.MustParsePrefix("10.99.2.0/24"), Remote: testenv.OutsideAddr4, Mode: maps.NodeDirect, MTU: 1500}
		return maps.With(testenv.Context(t), datapath, func(store *maps.Store) error { return store.SetNodes([]maps.Node{node}) })
	})
	for _, noun := range nouns {
		t.Run(noun, func(t *testing.T) { (&nounTest{t, s, noun, args[noun]}).run() })
	}
}

// nounTest is a noun under test, with the arguments that it needs.
type nounTest struct {
	*testing.T
	script *script
	noun   string
	args   []string
}

func (n *nounTest) run() {
	n.formats()
	n.terminal()
	for _, wrong := range []string{"-ojs", "--no-header=1", "-q"} {
		if code, stdout, stderr := n.script.host.ctl(n.T, n.noun, wrong); code != 2 || stdout != "" || stderr == "" {
			n.Errorf("%s: got exit code %d, %q, %q; want 2, nothing, and why", wrong, code, stdout, stderr)
		}
	}
	_, names, _ := n.script.host.ctl(n.T, "__complete", n.noun, "")
	_, usage, _ := n.script.host.ctl(n.T, n.noun, "--help")
	if takesContainer := strings.Contains(usage, n.noun+" [CONTAINER]"); strings.Contains(names, "pods/web/eth0\n") != takesContainer {
		n.Errorf("completes %q; its argument is a container: %v", names, takesContainer)
	}
	if !strings.Contains(names, ":4\n") {
		n.Errorf("completes %q: want no files", names)
	}
}

// print prints on a pipe.
func (n *nounTest) print(flags ...string) string {
	n.Helper()
	want := 0
	if n.noun == "diff" || n.noun == "doctor" {
		want = 3
	}
	code, stdout, stderr := n.script.host.ctl(n.T, slices.Concat([]string{n.noun}, n.args, flags)...)
	if code != want || stdout == "" || stderr != "" {
		n.Errorf("%q: got exit code %d, %q, %q; want %d, and something on stdout alone", flags, code, stdout, stderr, want)
	}
	return stdout
}

func (n *nounTest) formats() {
	text, wide, names := n.print(), n.print("-o", "wide"), n.print("-o", "name")
	if first, _, _ := strings.Cut(text, "\n"); first == strings.ToUpper(first) {
		if headless := n.print("--no-headers"); strings.Contains(headless, first) || lines(headless) != lines(text)-1 {
			n.Errorf("--no-headers: got %q, want all but the first line of %q", headless, text)
		}
		if columns, _, _ := strings.Cut(wide, "\n"); len(strings.Fields(columns)) < len(strings.Fields(first)) {
			n.Errorf("-o wide: got columns %q, want also those of %q", columns, first)
		}
	}
	var value any
	document := n.print("-o", "json")
	if err := n.script.validate(n.noun, document); err != nil {
		n.Errorf("-o json: %v: %s", err, document)
	}
	if err := json.Unmarshal([]byte(document), &value); err != nil {
		n.Fatal(err)
	}
	things, isList := value.([]any)
	if !isList {
		things = []any{value}
	}
	if len(things) == 0 || n.noun != "flows" && lines(names) != len(things) { // a packet may come meanwhile
		n.Errorf("-o name: got %q, want a line for each of %d", names, len(things))
	}
	if yaml := n.print("-o", "yaml"); strings.HasPrefix(yaml, "- ") != isList || strings.ContainsAny(yaml[:1], "{[") {
		n.Errorf("-o yaml: got %q, want a list: %v", yaml, isList)
	}
	if all := text + wide + names; strings.Contains(all, "\x1b") {
		n.Errorf("got colors, want none on a pipe: %q", all)
	}
}

// terminal prints on one of 80 columns.
func (n *nounTest) terminal() {
	const columns = 80

	command := strings.Join(slices.Concat([]string{n.script.binary, n.noun}, n.args), " ")
	cmd := n.script.host.Node.Command(testenv.Context(n), "script", "-qec", fmt.Sprintf("stty cols %d rows 24; %s", columns, command), "/dev/null")
	cmd.Env = append(os.Environ(), "NO_COLOR=1", "TERM=xterm")
	out, _ := cmd.Output() // its exit code is that of print
	if len(out) == 0 || strings.Contains(string(out), "\x1b") {
		n.Errorf("on a terminal: got %q, want something without colors", out)
	}
	for line := range strings.Lines(string(out)) {
		if width := utf8.RuneCountInString(strings.TrimSpace(line)); width > columns {
			n.Errorf("got a line of %d columns, want at most %d: %s", width, columns, line)
		}
	}
}

func lines(text string) int { return strings.Count(text, "\n") }

// validate holds JSON to the schema of a command.
func (s *script) validate(command, text string) error {
	_, schema, stderr := s.host.ctl(s.T, "schema", command)
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		return fmt.Errorf("schema %s: %w: %s", command, err, stderr)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource(command, document); err != nil {
		return err
	}
	compiled, err := compiler.Compile(command)
	if err != nil {
		return err
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return err
	}
	return compiled.Validate(value)
}
