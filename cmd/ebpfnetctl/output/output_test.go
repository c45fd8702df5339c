package output

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

type thing struct {
	Name  string `json:"name"`
	Place string `json:"place"`
	Count int    `json:"count"`
}

var things = Noun[thing]{
	Columns: []Column[thing]{
		{Head: "NAME", Text: func(t thing) string { return t.Name }, Color: func(t thing) Color {
			if t.Count > 9 {
				return Red
			}
			return Plain
		}},
		{Head: "COUNT", Text: func(t thing) string { return fmt.Sprint(t.Count) }, Right: true},
		{Head: "PLACE", Text: func(t thing) string { return t.Place }},
		{Head: "TWICE", Text: func(t thing) string { return fmt.Sprint(2 * t.Count) }, Right: true, Wide: true},
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
		{Flags{Text, false}, "NAME              COUNT  PLACE\na                     1  -\n\\x1b[2Jb\\u202e\\n     10  123\n"},
		{Flags{Text, true}, "a                  1  -\n\\x1b[2Jb\\u202e\\n  10  123\n"},
		{Flags{Wide, false}, "NAME              COUNT  PLACE  TWICE\na                     1  -          2\n\\x1b[2Jb\\u202e\\n     10  123       20\n"},
		{Flags{Name, false}, "a\n\\x1b[2Jb\\u202e\\n\n"},
		{Flags{JSON, false}, "[\n  {\n    \"name\": \"a\",\n    \"place\": \"\",\n    \"count\": 1\n  },\n  {\n    \"name\": \"\\u001b[2Jb\\u202e\\n\",\n    \"place\": \"123\",\n    \"count\": 10\n  }\n]\n"},
		{Flags{YAML, false}, "- name: a\n  place: \"\"\n  count: 1\n- name: \"\\e[2Jb\\u202e\\n\"\n  place: \"123\"\n  count: 10\n"},
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
	var fromJSON, fromYAML []thing
	if err := json.Unmarshal(asJSON.Bytes(), &fromJSON); err != nil || !reflect.DeepEqual(fromJSON, all) {
		t.Errorf("JSON: got %#v (%v), want %#v", fromJSON, err, all)
	}
	if err := yaml.Unmarshal(asYAML.Bytes(), &fromYAML); err != nil || !reflect.DeepEqual(fromYAML, all) {
		t.Errorf("YAML: got %#v (%v), want %#v; %s", fromYAML, err, all, asYAML.String())
	}
	for _, text := range []string{asJSON.String(), asYAML.String()} {
		for _, r := range text {
			if r != '\n' && (r < ' ' || r >= 0x7f && r < 0xa0 || r == 0x2028 || r == 0xfeff || r == 0xe0001) {
				t.Errorf("got %q in the output, want it escaped: %s", r, text)
			}
		}
	}
}

// TestTerminal cuts a table to the width of a terminal, and only there.
func TestTerminal(t *testing.T) {
	long := []thing{{strings.Repeat("n", 64), strings.Repeat("ü", 90), 123456}, {"b", "c", 12}}
	for _, width := range []int{80, 40, 24} {
		var got bytes.Buffer
		things.Table(&Printer{Flags: Flags{Format: Text}, to: &got, width: width}, long)
		for line := range strings.Lines(got.String()) {
			if n := utf8.RuneCountInString(line) - 1; n > width {
				t.Errorf("%d columns: got a line of %d: %s", width, n, line)
			}
		}
		if !strings.Contains(got.String(), "123456") || !strings.Contains(got.String(), "n…") {
			t.Errorf("%d columns: want the number, and the name cut:\n%s", width, got.String())
		}
	}
	for _, p := range []*Printer{{Flags: Flags{Format: Wide}, width: 80}, {Flags: Flags{Format: Text}}} {
		var got bytes.Buffer
		things.Table(p.On(&got, p.width), long)
		if !strings.Contains(got.String(), long[0].Name) || !strings.Contains(got.String(), long[0].Place) {
			t.Errorf("-o %s, %d columns: want nothing cut:\n%s", p.Format, p.width, got.String())
		}
	}
}

// TestWraps breaks a sentence into lines.
func TestWraps(t *testing.T) {
	sentences := Noun[thing]{Columns: []Column[thing]{
		{Head: "NAME", Text: func(t thing) string { return t.Name }},
		{Head: "WHAT", Text: func(t thing) string { return t.Place }, Wraps: true},
	}}
	all := []thing{{"a", "the container lacks the route to 10.0.0.0/8", 1}, {"b", "it is down", 2}, {"c", strings.Repeat("x", 40), 3}}
	for width, want := range map[int]string{
		0:  "NAME  WHAT\na     the container lacks the route to 10.0.0.0/8\nb     it is down\nc     " + strings.Repeat("x", 40) + "\n",
		30: "NAME  WHAT\na     the container lacks the\n      route to 10.0.0.0/8\nb     it is down\nc     " + strings.Repeat("x", 23) + "…\n",
	} {
		var got bytes.Buffer
		sentences.Table(&Printer{Flags: Flags{Format: Text}, to: &got, width: width}, all)
		if got.String() != want {
			t.Errorf("%d columns: got\n%s\nwant\n%s", width, got.String(), want)
		}
	}
}

func TestCut(t *testing.T) {
	for _, test := range []struct {
		text    string
		width   int
		keepEnd bool
		want    string
	}{
		{"[2001:db8::1]:443", 17, true, "[2001:db8::1]:443"},
		{"[2001:db8::1]:443", 14, true, "[2001:d…1]:443"},
		{"[2001:db8::1]:65535", 14, true, "[2001:d…:65535"},
		{"[2001:db8::1]:443", 14, false, "[2001:db8::1]…"},
		{"[2001:db8::1]:443", 4, true, "[…43"},
		{"üüüüü", 4, false, "üüü…"},
	} {
		if got := cut(test.text, test.width, test.keepEnd); got != test.want {
			t.Errorf("cut(%q, %d, %v): got %q, want %q", test.text, test.width, test.keepEnd, got, test.want)
		}
	}
}

func TestColor(t *testing.T) {
	var colored, plain bytes.Buffer
	things.Table(&Printer{Flags: Flags{Format: Text}, to: &colored, width: 80, color: true}, some)
	things.Table(New(&plain, Flags{Format: Text}), some)
	if !strings.Contains(colored.String(), "\x1b[31m\\x1b[2Jb") || strings.Contains(plain.String(), "\x1b") {
		t.Errorf("got %q on a terminal, %q elsewhere; want red there alone", colored.String(), plain.String())
	}
	if bare := strings.NewReplacer("\x1b[31m", "", "\x1b[0m", "").Replace(colored.String()); bare != plain.String() {
		t.Errorf("got %q without colors, want %q", bare, plain.String())
	}
}

func TestFlags(t *testing.T) {
	for _, test := range []struct {
		add  func(*Flags, *pflag.FlagSet)
		args string
		want string // of an error
	}{
		{(*Flags).AddToNoun, "-o yaml --no-headers", ""},
		{(*Flags).AddToNoun, "-ojson", ""},
		{(*Flags).AddToNoun, "--output=table", "expected text, wide, json, yaml or name"},
		{(*Flags).AddToVerb, "-o wide", "expected text, json or yaml"},
		{(*Flags).AddToVerb, "--no-headers", "unknown flag"},
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
