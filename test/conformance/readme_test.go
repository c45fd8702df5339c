package conformance

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	repository = "../.."
	readme     = repository + "/README.md"
)

// exampleConflist returns the network configuration list that users copy.
func exampleConflist(t *testing.T) []byte {
	t.Helper()
	return readFile(t, repository+"/cmd/ebpfnet/example.conflist")
}

func TestREADMEShowsExample(t *testing.T) {
	if block := "```json\n" + string(exampleConflist(t)) + "```\n"; !strings.Contains(string(readFile(t, readme)), block) {
		t.Errorf("%s does not show cmd/ebpfnet/example.conflist:\n%s", readme, block)
	}
}

func TestREADMEIsShort(t *testing.T) {
	const maxLines, maxColumns = 130, 120

	lines := strings.Split(strings.TrimSpace(string(readFile(t, readme))), "\n")
	if len(lines) > maxLines {
		t.Errorf("%s has %d lines, want at most %d", readme, len(lines), maxLines)
	}
	for i, line := range lines {
		if columns := utf8.RuneCountInString(line); columns > maxColumns {
			t.Errorf("%s:%d has %d columns, want at most %d", readme, i+1, columns, maxColumns)
		}
	}
}

var relativeLink = regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)

// TestREADMELinks requires that links between documents lead to files and to sections that exist.
func TestREADMELinks(t *testing.T) {
	var files []string
	for _, pattern := range []string{"*", "*/*", "*/*/*", "*/*/*/*"} {
		found, _ := filepath.Glob(filepath.Join(repository, pattern+".md"))
		files = append(files, found...)
	}
	for _, file := range files {
		for _, match := range relativeLink.FindAllStringSubmatch(string(readFile(t, file)), -1) {
			target := file
			if match[1] != "" {
				target = filepath.Join(filepath.Dir(file), match[1])
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: link %s: %v", file, match[1], err)
			} else if anchor := strings.TrimPrefix(match[2], "#"); anchor != "" && !slices.Contains(anchors(t, target), anchor) {
				t.Errorf("%s: %s has no section for the link #%s", file, target, anchor)
			}
		}
	}
}

var (
	heading     = regexp.MustCompile(`(?m)^#+ (.*)$`)
	notInAnchor = regexp.MustCompile("[^a-z0-9_ -]")
)

// anchors returns the names that GitHub gives to a document's headings.
func anchors(t *testing.T, file string) []string {
	t.Helper()
	var names []string
	for _, match := range heading.FindAllStringSubmatch(string(readFile(t, file)), -1) {
		name := notInAnchor.ReplaceAllString(strings.ToLower(match[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
