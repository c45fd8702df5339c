package conformance

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	repository = "../.."
	readme     = repository + "/README.md"
)

// exampleConflist returns the network configuration list that users copy.
func exampleConflist(t *testing.T) []byte {
	t.Helper()
	return testenv.ReadFile(t, repository+"/cmd/ebpfnet/example.conflist")
}

func TestREADMEShowsExample(t *testing.T) {
	if block := "```json\n" + string(exampleConflist(t)) + "```\n"; !strings.Contains(string(testenv.ReadFile(t, readme)), block) {
		t.Errorf("%s does not show cmd/ebpfnet/example.conflist:\n%s", readme, block)
	}
}

func TestREADMEIsShort(t *testing.T) {
	const maxLines, maxColumns = 130, 120

	lines := strings.Split(strings.TrimSpace(string(testenv.ReadFile(t, readme))), "\n")
	if len(lines) > maxLines {
		t.Errorf("%s has %d lines, want at most %d", readme, len(lines), maxLines)
	}
	for i, line := range lines {
		if columns := utf8.RuneCountInString(line); columns > maxColumns {
			t.Errorf("%s:%d has %d columns, want at most %d", readme, i+1, columns, maxColumns)
		}
	}
}

// documents returns all of the repository.
func documents(t *testing.T) (files []string) {
	t.Helper()
	for _, pattern := range []string{"*", "*/*", "*/*/*", "*/*/*/*"} {
		found, _ := filepath.Glob(filepath.Join(repository, pattern+".md"))
		files = append(files, found...)
	}
	if !slices.Contains(files, readme) {
		t.Fatalf("documents: got %v, want %s among them", files, readme)
	}
	return files
}

var relativeLink = regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)

// TestREADMELinks requires that links between documents lead to files and to sections that exist.
func TestREADMELinks(t *testing.T) {
	for _, file := range documents(t) {
		for _, match := range relativeLink.FindAllStringSubmatch(string(testenv.ReadFile(t, file)), -1) {
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

// listed is what runs a block of commands that are all of this project's own tools: `make test` and .ci/run run some of
// them, and the others take long or need a quiet machine. TestREADMECommands wants their targets and tests to exist.
const listed = "make"

// byHand is what runs a block of commands that need what no test has, such as kind's images. The document says where it was
// run.
const byHand = "What was run"

// commandTests are the tests that run the blocks of commands of each document as they are written, in their order.
var commandTests = map[string][]string{
	"README.md":                              {"TestQuickStart", "TestQuickStart"},
	"cmd/release/README.md":                  {"TestQuickStart"},
	"cmd/ebpfnet-node/README.md":             {"TestDoctorPeers"},
	"cmd/ebpfnet-node/manifests/README.md":   {"TestREADME", "TestREADME"},
	"cmd/ebpfnet-node/manifests/CLUSTERS.md": {byHand, byHand, byHand, byHand, byHand},
	"cmd/ebpfnet-node/manifests/FLANNEL.md":  {"TestFlannel", "TestFlannel", "TestFlannel", "TestFlannel", "TestFlannel", "TestFlannel"},
	"cmd/ebpfnetctl/README.md":               {"TestREADMEOnNode"},
	"plugin/README.md":                       {"TestREADMEOnNode"},
	"test/README.md":                         {listed, listed},
	"test/kube/README.md":                    {listed},
	"test/runtimes/README.md":                {listed},
	"test/vm/README.md":                      {listed},
}

// TestREADMECommands wants a test for each block of commands of each document.
func TestREADMECommands(t *testing.T) {
	code := map[string]string{} // of the tests
	err := filepath.WalkDir(repository, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			code[path] = string(testenv.ReadFile(t, path))
		}
		return err
	})
	testenv.Must(t, err)
	unused := maps.Clone(commandTests)
	for _, file := range documents(t) {
		name, _ := filepath.Rel(repository, file)
		delete(unused, name)
		blocks := testenv.Commands(t, file)
		if len(blocks) != len(commandTests[name]) {
			t.Errorf("%s: got %d blocks of commands and %d tests of them", name, len(blocks), len(commandTests[name]))
			continue
		}
		for i, test := range commandTests[name] {
			if test == listed {
				checkCommands(t, name, blocks[i], code)
			} else if test == byHand {
				if !strings.Contains(string(testenv.ReadFile(t, file)), "## "+byHand) {
					t.Errorf("%s: it does not say what was run", name)
				}
			} else if !slices.ContainsFunc(slices.Collect(maps.Values(code)), func(text string) bool {
				return strings.Contains(text, "func "+test+"(") && strings.Contains(text, filepath.Base(name))
			}) {
				t.Errorf("%s: no %s that reads it", name, test)
			}
		}
	}
	if len(unused) > 0 {
		t.Errorf("there are tests of documents that do not exist: %v", unused)
	}
}

var (
	makeTarget = regexp.MustCompile(`\bmake((?: [a-z][a-z0-9-]*)+)`)
	changeDir  = regexp.MustCompile(`(?m)^cd \S+ *(#.*)?$`)
	testName   = regexp.MustCompile(`(?:-run|-fuzz|test\.run) '\^?(\w+)`)
)

// checkCommands wants the targets of make and the tests in a block to exist.
func checkCommands(t *testing.T, name, block string, code map[string]string) {
	t.Helper()
	makefile := string(testenv.ReadFile(t, repository+"/Makefile"))
	found := 0
	for _, match := range makeTarget.FindAllStringSubmatch(block, -1) {
		for target := range strings.FieldsSeq(match[1]) {
			if found++; !regexp.MustCompile(`(?m)^` + target + `( [a-z-]+)*:`).MatchString(makefile) {
				t.Errorf("%s: the Makefile has no target %s", name, target)
			}
		}
	}
	for _, match := range testName.FindAllStringSubmatch(block, -1) {
		if found++; match[1] != "" && !strings.Contains(fmt.Sprint(code), "func "+match[1]+"(") {
			t.Errorf("%s: there is no test %s", name, match[1])
		}
	}
	if lines := strings.Split(strings.TrimSpace(changeDir.ReplaceAllString(block, "")), "\n"); found < len(lines) {
		t.Errorf("%s: got targets and tests in %d lines, want them in all:\n%s", name, found, block)
	}
}

// TestREADMEOnNode runs commands that name a container or read what ebpfnetctl prints.
func TestREADMEOnNode(t *testing.T) {
	h := newHost(t)
	h.pod(t, "CONTAINER", dual("1.1.0")).add(t)
	h.pod(t, "web", with(dual("1.1.0"), "runtimeConfig.portMappings", list{object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}})).add(t)
	var output []byte
	for _, file := range []string{"plugin/README.md", "cmd/ebpfnetctl/README.md"} {
		for _, block := range testenv.Commands(t, repository+"/"+file) {
			cmd := h.Node.Command(testenv.Context(t), "bash", "-eo", "pipefail", "-c", block)
			cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(testenv.Build(t, "./cmd/ebpfnetctl"))+":"+os.Getenv("PATH"))
			printed, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%s: %v: %s", block, err, printed)
			}
			output = append(output, printed...)
		}
	}
	if want := "tcp 8080 10.88.0.3 80"; !strings.Contains(string(output), want) {
		t.Errorf("got %s, want %q", output, want)
	}
	if text := mustCtl(t, h, "attachments"); !strings.Contains(text, "isolated") {
		t.Errorf("got %s, want the policy", text)
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
	for _, match := range heading.FindAllStringSubmatch(string(testenv.ReadFile(t, file)), -1) {
		name := notInAnchor.ReplaceAllString(strings.ToLower(match[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}
