package conformance

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// readmeConflist returns the README's network configuration list, the first JSON block that names the plugin, so that
// a test runs what users copy.
func readmeConflist(t *testing.T) []byte {
	t.Helper()
	const path = "../../README.md"

	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	conflist, err := firstConflist(string(text))
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return []byte(conflist)
}

var jsonBlock = regexp.MustCompile("(?ms)^```json\n(.*?)^```")

func firstConflist(markdown string) (string, error) {
	for _, block := range jsonBlock.FindAllStringSubmatch(markdown, -1) {
		if strings.Contains(block[1], `"ebpfnet"`) {
			return block[1], nil
		}
	}
	return "", fmt.Errorf("no JSON block contains %q", "ebpfnet")
}

func TestFirstConflist(t *testing.T) {
	const other, wanted = "```json\n{\"a\": 1}\n```\n", "```json\n{\"type\": \"ebpfnet\"}\n```\n"
	for _, test := range []struct{ name, markdown, want string }{
		{"only one", wanted, "{\"type\": \"ebpfnet\"}\n"},
		{"after another", other + "text\n" + wanted + wanted, "{\"type\": \"ebpfnet\"}\n"},
		{"none", other + "ebpfnet\n", ""},
		{"another language", strings.Replace(wanted, "json", "sh", 1), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := firstConflist(test.markdown)
			if got != test.want || (err != nil) != (test.want == "") {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}
