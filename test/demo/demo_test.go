package main

import (
	"bytes"
	"errors"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadmeConflist(t *testing.T) {
	list, err := readConflist(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	if list.name == "" || !list.masq || !list.ports {
		t.Errorf("the README's list is %+v, but the demo shows masquerading and host ports", list)
	}
}

func TestJSONBlock(t *testing.T) {
	const wanted = "{\"type\": \"ebpfnet\"}\n"
	for name, test := range map[string]struct {
		markdown string
		found    bool
	}{
		"first of two":      {"text\n```json\n" + wanted + "```\n```json\n{\"type\": \"ebpfnet\", \"mtu\": 1}\n```\n", true},
		"after another":     {"```json\n{\"type\": \"bridge\"}\n```\n```json\n" + wanted + "```\n", true},
		"indented":          {"  ```json\n" + wanted + "  ```\n", true},
		"other language":    {"```sh\n" + wanted + "```\n", false},
		"never closed":      {"```json\n" + wanted, false},
		"between blocks":    {"```json\n{}\n```\n" + wanted + "```json\n{}\n```\n", false},
		"name in a comment": {"```json\n{\"//\": \"ebpfnet's\"}\n```\n", false},
		"nothing":           {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			block, found := jsonBlock(test.markdown)
			if found != test.found || found && block != wanted {
				t.Errorf("found %v, %q", found, block)
			}
		})
	}
}

func TestConflistRefused(t *testing.T) {
	for name, raw := range map[string]string{
		"directory of the host": `{"name": "n", "plugins": [{"type": "ebpfnet", "ipam": {"dataDir": "/etc"}}]}`,
		"other plugin":          `{"name": "n", "plugins": [{"type": "bridge"}]}`,
		"no plugin":             `{"name": "n"}`,
		"other JSON":            `[]`,
	} {
		if err := (&conflist{raw: []byte(raw)}).parse(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestOptions(t *testing.T) {
	if opts, err := parseOptions([]string{"-conflist", "f", "-o", "json"}); err != nil || opts != (options{conflist: "f", json: true}) {
		t.Errorf("%+v, %v", opts, err)
	}
	for _, args := range []string{"-o xml", "-pause -o json", "extra", "-unknown"} {
		if _, err := parseOptions(strings.Fields(args)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
}

// The message and its checksum are from the example in RFC 1071, section 3.
func TestChecksum(t *testing.T) {
	if got := checksum([]byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7}); got != ^uint16(0xddf2) {
		t.Errorf("%#x", got)
	}
}

func TestReportFailure(t *testing.T) {
	var person bytes.Buffer
	r := &report{person: &person}
	r.begin(&step{Name: "s", Title: "Title", width: 5}, "why")
	r.ok("good", "seen %d", 1)
	err := errors.Join(&mismatch{"bad", "this", "that"})
	r.end(0, err)
	if code := r.finish(err); code != 1 {
		t.Errorf("exit code %d", code)
	}
	for _, want := range []string{"1. Title\n", "   why\n", "✓ good  seen 1\n", "✗ bad\n", "expected this\n", "saw      that\n"} {
		if !strings.Contains(person.String(), want) {
			t.Errorf("%q is missing from\n%s", want, person.String())
		}
	}
	if s := r.last(); s.OK || len(s.Details) != 2 || s.Details[1].OK || r.summary.OK {
		t.Errorf("summary is %+v", r.summary)
	}
}
