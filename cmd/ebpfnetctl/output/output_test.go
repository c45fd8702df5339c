package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

type thing struct {
	Name  string `json:"name"`
	Place string `json:"place"`
	Count int    `json:"count"`
}

var things = Table[thing]{
	Columns: []Column[thing]{
		{Head: "NAME", Text: func(t thing) string { return t.Name }},
		{Head: "COUNT", Text: func(t thing) string { return fmt.Sprint(t.Count) }},
		{Head: "PLACE", Text: func(t thing) string { return t.Place }},
		{Head: "TWICE", Text: func(t thing) string { return fmt.Sprint(2 * t.Count) }, Wide: true},
	},
	Name: func(t thing) string { return t.Name },
	None: "there is nothing",
}

// some has a name that clears the screen, turns text around and starts a line, and a place that looks like a number.
var some = []thing{{"a", "", 1}, {"\x1b[2Jb\u202e\n", "123", 10}}

func TestFormats(t *testing.T) {
	for _, test := range []struct {
		flags Flags
		want  string
	}{
		{Flags{Text, false}, "NAME              COUNT  PLACE\na                 1      -\n\\x1b[2Jb\\u202e\\n  10     123\n"},
		{Flags{Text, true}, "a                 1   -\n\\x1b[2Jb\\u202e\\n  10  123\n"},
		{Flags{Wide, false}, "NAME              COUNT  PLACE  TWICE\na                 1      -      2\n\\x1b[2Jb\\u202e\\n  10     123    20\n"},
		{Flags{Name, false}, "a\n\\x1b[2Jb\\u202e\\n\n"},
		{Flags{JSON, false}, "[\n  {\n    \"name\": \"a\",\n    \"place\": \"\",\n    \"count\": 1\n  },\n  {\n    \"name\": \"\\u001b[2Jb\\u202e\\n\",\n    \"place\": \"123\",\n    \"count\": 10\n  }\n]\n"},
		{Flags{YAML, false}, "- count: 1\n  name: a\n  place: \"\"\n- count: 10\n  name: \"\\e[2Jb\\u202e\\n\"\n  place: \"123\"\n"},
	} {
		var got bytes.Buffer
		if err := things.Print(New(&got, test.flags), some); err != nil || got.String() != test.want {
			t.Errorf("%+v: got (%v)\n%s\nwant\n%s", test.flags, err, got.String(), test.want)
		}
	}
}

func TestNothing(t *testing.T) {
	for flags, want := range map[Flags]string{
		{Text, false}: "there is nothing\n", {Text, true}: "", {Wide, false}: "there is nothing\n",
		{Name, false}: "", {JSON, false}: "[]\n", {YAML, false}: "[]\n",
	} {
		var got bytes.Buffer
		if err := things.Print(New(&got, flags), nil); err != nil || got.String() != want {
			t.Errorf("%+v: got %q (%v), want %q", flags, got.String(), err, want)
		}
	}
}

// TestYAMLIsJSON reads back what both formats print.
func TestYAMLIsJSON(t *testing.T) {
	var all []thing
	for _, text := range []string{"", "no", "null", "1e3", "0x10", "~", "a: b", "- a", "# a", "'", `"`, "a\tb", "\x00", "\u2028", "\ufeff", "\U000e0001", "ü", "日本", "a\\nb", "\u009b2J", "2026-11-22"} {
		all = append(all, thing{text, text, len(text)})
	}
	var asJSON, asYAML bytes.Buffer
	if err := New(&asJSON, Flags{Format: JSON}).Value(all); err != nil {
		t.Fatal(err)
	}
	if err := New(&asYAML, Flags{Format: YAML}).Value(all); err != nil {
		t.Fatal(err)
	}
	asRead := slices.Clone(all)
	for i := range asRead { // YAML leaves this one to show.JSON
		asRead[i].Name = strings.ReplaceAll(asRead[i].Name, "\u2028", `\u2028`)
		asRead[i].Place = asRead[i].Name
	}
	var fromJSON, fromYAML []thing
	if err := json.Unmarshal(asJSON.Bytes(), &fromJSON); err != nil || !reflect.DeepEqual(fromJSON, all) {
		t.Errorf("JSON: got %#v (%v), want %#v", fromJSON, err, all)
	}
	if err := yaml.Unmarshal(asYAML.Bytes(), &fromYAML); err != nil || !reflect.DeepEqual(fromYAML, asRead) {
		t.Errorf("YAML: got %#v (%v), want %#v; %s", fromYAML, err, asRead, asYAML.String())
	}
	for _, text := range []string{asJSON.String(), asYAML.String()} {
		for _, r := range text {
			if r != '\n' && (r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x2028 || r == 0xfeff || r == 0xe0001) {
				t.Errorf("got %q in the output, want it escaped: %s", r, text)
			}
		}
	}
}

func TestFlags(t *testing.T) {
	for _, test := range []struct {
		add  func(*Flags, *pflag.FlagSet)
		args string
		want string // of an error
	}{
		{(*Flags).AddToRead, "-o yaml --no-headers", ""},
		{(*Flags).AddToRead, "-ojson", ""},
		{(*Flags).AddToRead, "--output=table", "expected text, wide, json, yaml or name"},
		{(*Flags).AddToWrite, "-o wide", "expected text, json or yaml"},
		{(*Flags).AddToWrite, "--no-headers", "unknown flag"},
	} {
		var flags Flags
		set := pflag.NewFlagSet("", pflag.ContinueOnError)
		test.add(&flags, set)
		err := set.Parse(strings.Fields(test.args))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", test.args, err, test.want)
		}
	}
}

func TestIsWord(t *testing.T) {
	for text, want := range map[string]bool{
		"web-1": true, "pods/4f0c/eth0": true, "fd00::1": true,
		"": false, "-o": false, "a b": false, "$(reboot)": false, "a;b": false, "`a`": false, "a\x1b": false, "ü": false, "*": false, "~": false,
	} {
		if got := IsWord(text); got != want {
			t.Errorf("IsWord(%q): got %v, want %v", text, got, want)
		}
	}
}
