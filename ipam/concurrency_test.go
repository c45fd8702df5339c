package ipam

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A child runs this test binary again, with these variables as parameters of TestChild.
const (
	childDir  = "EBPFNET_IPAM_TEST_DIR"
	childIdx  = "EBPFNET_IPAM_TEST_INDEX"
	childName = "EBPFNET_IPAM_TEST_CHILD"
)

const (
	perChild    = 25
	childRanges = `[[{"subnet": "10.1.0.0/24"}]]`
)

// TestChild is the main function of the processes that TestConcurrentProcesses starts.
func TestChild(t *testing.T) {
	dir, name := os.Getenv(childDir), os.Getenv(childName)
	if dir == "" {
		return // nothing is skipped
	}
	section := fmt.Sprintf(`{"dataDir": %q, "ranges": %s}`, filepath.Dir(dir), childRanges)
	pool := Open(parse(t, filepath.Base(dir), section, Request{}), Options{IndexDir: os.Getenv(childIdx)})
	for i := range perChild {
		fmt.Println("got", mustReserve(t, pool, Attachment{fmt.Sprintf("%s-%d", name, i), "eth0"}))
	}
}

// TestConcurrentProcesses wants no address to be reserved twice. test/conformance kills processes.
func TestConcurrentProcesses(t *testing.T) {
	const processes = 8
	pool, _ := newPool(t, childRanges)
	outputs := make([]bytes.Buffer, processes)
	var children []*exec.Cmd
	for i := range processes {
		child := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
		child.Env = append(os.Environ(), childDir+"="+pool.cfg.Dir(), childIdx+"="+pool.options.IndexDir, fmt.Sprintf("%s=child%d", childName, i))
		child.Stdout, child.Stderr = &outputs[i], &outputs[i]
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		children = append(children, child)
	}
	got := map[string]bool{}
	for i, child := range children {
		if err := child.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, &outputs[i])
		}
		for line := range strings.Lines(outputs[i].String()) {
			if addr, found := strings.CutPrefix(line, "got "); found {
				got[addr] = true
			}
		}
	}
	if len(got) != processes*perChild {
		t.Errorf("%d different addresses were reserved, want %d", len(got), processes*perChild)
	}
}
