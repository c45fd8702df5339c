package conformance

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// others have a schema, too, and are no read commands: trace tries something, and the rest write.
var others = []string{"migrate", "repair", "trace", "upgrade"}

// TestCtlRead tests what all read commands have in common: formats, headings, completion, and exit codes.
func TestCtlRead(t *testing.T) {
	s := newScript(t)
	args := map[string][]string{
		"doctor": {"--cache-dir", s.runtime.CacheDir},
		"top":    {"--interval", "100ms"},
	}
	_, list, _ := s.host.ctl(t, "schema")
	commands := slices.DeleteFunc(strings.Fields(list), func(name string) bool { return slices.Contains(others, name) })
	if len(commands) < 8 {
		t.Fatalf("got %q, want them all", commands)
	}
	for _, command := range commands {
		code, stdout, stderr := s.host.ctl(t, append([]string{command}, args[command]...)...)
		switch command {
		case "doctor", "version":
		case "status":
			if code != 1 || stdout != "" || !strings.Contains(stderr, "not loaded") {
				t.Errorf("status before the first ADD: got exit code %d, %q, %q; want 1, nothing, and why", code, stdout, stderr)
			}
		default:
			if code != 0 || !strings.HasPrefix(stdout, "nothing is loaded yet") {
				t.Errorf("%s before the first ADD: got exit code %d, %q, %q; want 0, and an empty list", command, code, stdout, stderr)
			}
		}
	}
	web := s.runtime.AddPod(t, "web", map[string]any{"portMappings": []map[string]any{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}})
	for _, family := range testenv.Families {
		remote := netip.AddrPortFrom(family.Outside, 7001)
		testenv.Must(t, s.ask(s.host.Outside, web.Namespace, "udp", remote, remote))
	}
	testenv.Must(t, web.SendFrames(testenv.PodIfName, make([]byte, 60))) // a forged one, for drops
	s.host.awaitForged(t, 1)
	s.host.wantCtl(t, 0, []string{"set", "pods/web", "ingressPolicy=isolated"})
	testenv.Must(t, s.host.Node.SetSysctl("net/ipv4/ip_forward", "0")) // for doctor to find
	s.host.withDatapath(t, func(datapath *loader.Datapath) error {
		node := maps.Node{Prefix: netip.MustParsePrefix("10.99.2.0/24"), Remote: testenv.OutsideAddr4, Mode: maps.NodeDirect, MTU: 1500}
		return maps.With(testenv.Context(t), datapath, func(store *maps.Store) error { return store.SetNodes([]maps.Node{node}) })
	})
	for _, command := range []string{"trace", "policy explain"} {
		for _, begun := range []string{"", "web "} {
			words := append(append([]string{"__complete"}, strings.Fields(command+" "+begun)...), "")
			if _, names, _ := s.host.ctl(t, words...); !strings.Contains(names, "pods/web/eth0\n") || !strings.Contains(names, ":4\n") {
				t.Errorf("%q: got %q, want the container, and no files", words, names)
			}
		}
	}
	for _, command := range commands {
		t.Run(command, func(t *testing.T) { (&readTest{t, s, command, args[command]}).run() })
	}
}

// readTest is a read command under test, with the arguments that it needs.
type readTest struct {
	*testing.T
	script *script
	name   string
	args   []string
}

func (n *readTest) run() {
	n.formats()
	for _, wrong := range []string{"-ojs", "--no-header=1", "-q"} {
		if code, stdout, stderr := n.script.host.ctl(n.T, n.name, wrong); code != 2 || stdout != "" || stderr == "" {
			n.Errorf("%s: got exit code %d, %q, %q; want 2, nothing, and why", wrong, code, stdout, stderr)
		}
	}
	_, names, _ := n.script.host.ctl(n.T, "__complete", n.name, "")
	_, usage, _ := n.script.host.ctl(n.T, n.name, "--help")
	if takesContainer := strings.Contains(usage, n.name+" [CONTAINER]"); strings.Contains(names, "pods/web/eth0\n") != takesContainer {
		n.Errorf("completes %q; its argument is a container: %v", names, takesContainer)
	}
	if !strings.Contains(names, ":4\n") {
		n.Errorf("completes %q: want no files", names)
	}
}

// print prints on a pipe.
func (n *readTest) print(flags ...string) string {
	n.Helper()
	want := 0
	if n.name == "doctor" {
		want = 3
	}
	code, stdout, stderr := n.script.host.ctl(n.T, slices.Concat([]string{n.name}, n.args, flags)...)
	if code != want || stdout == "" || stderr != "" {
		n.Errorf("%q: got exit code %d, %q, %q; want %d, and something on stdout alone", flags, code, stdout, stderr, want)
	}
	return stdout
}

func (n *readTest) formats() {
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
	if err := n.script.validate(n.name, document); err != nil {
		n.Errorf("-o json: %v: %s", err, document)
	}
	testenv.Must(n, json.Unmarshal([]byte(document), &value))
	things, isList := value.([]any)
	if !isList {
		things = []any{value}
	}
	if len(things) == 0 || n.name != "flows" && lines(names) != len(things) { // a packet may come meanwhile
		n.Errorf("-o name: got %q, want a line for each of %d", names, len(things))
	}
	if yaml := n.print("-o", "yaml"); strings.HasPrefix(yaml, "- ") != isList || strings.ContainsAny(yaml[:1], "{[") {
		n.Errorf("-o yaml: got %q, want a list: %v", yaml, isList)
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
