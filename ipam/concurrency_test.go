package ipam

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestConcurrentGoroutines(t *testing.T) {
	const goroutines = 64
	pool, _ := newPool(t, `[[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]`)
	got := make([]string, goroutines)
	var wg sync.WaitGroup
	for i := range goroutines {
		wg.Go(func() {
			result, err := pool.Reserve(t.Context(), Attachment{fmt.Sprintf("c%d", i), "eth0"})
			if err != nil {
				t.Error(err)
				return
			}
			for _, address := range result.Addresses {
				got[i] += address.Prefix.Addr().String() + "\n"
			}
		})
	}
	wg.Wait()
	checkUnique(t, strings.Fields(strings.Join(got, "")), 2*goroutines)

	for i := range goroutines {
		wg.Go(func() {
			if err := pool.Release(t.Context(), Attachment{fmt.Sprintf("c%d", i), "eth0"}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if released, err := pool.Retain(t.Context(), nothing); err != nil || released != nil {
		t.Errorf("releases were lost: %v, %v", released, err)
	}
}

// A child runs this test binary again, with these variables as parameters of TestChild.
const (
	childDir  = "EBPFNET_IPAM_TEST_DIR"
	childIdx  = "EBPFNET_IPAM_TEST_INDEX"
	childName = "EBPFNET_IPAM_TEST_CHILD"
	childMode = "EBPFNET_IPAM_TEST_MODE"
)

const (
	perChild    = 25
	childRanges = `[[{"subnet": "10.1.0.0/24"}]]`
)

// TestChild is the main function of the processes that the tests below start.
func TestChild(t *testing.T) {
	dir, name := os.Getenv(childDir), os.Getenv(childName)
	if dir == "" {
		return // nothing is skipped: the tests below start it
	}
	section := fmt.Sprintf(`{"dataDir": %q, "ranges": %s}`, filepath.Dir(dir), childRanges)
	pool := Open(parse(t, filepath.Base(dir), section, Request{}), Options{IndexDir: os.Getenv(childIdx)})
	if os.Getenv(childMode) == "churn" {
		for i := 0; ; i++ {
			a := Attachment{fmt.Sprintf("%s-%d", name, i), "eth0"}
			mustReserve(t, pool, a)
			if i%4 != 0 {
				mustRelease(t, pool, a)
			}
		}
	}
	for i := range perChild {
		fmt.Println("got", mustReserve(t, pool, Attachment{fmt.Sprintf("%s-%d", name, i), "eth0"}))
	}
}

func startChild(t *testing.T, pool *Pool, name, mode string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	output := &bytes.Buffer{}
	child := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v")
	child.Env = append(os.Environ(), childDir+"="+pool.cfg.Dir(), childIdx+"="+pool.options.IndexDir, childName+"="+name, childMode+"="+mode)
	child.Stdout, child.Stderr = output, output
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	return child, output
}

func TestConcurrentProcesses(t *testing.T) {
	const processes = 8
	pool, _ := newPool(t, childRanges)
	var children []*exec.Cmd
	var outputs []*bytes.Buffer
	for i := range processes {
		child, output := startChild(t, pool, fmt.Sprintf("child%d", i), "reserve")
		children, outputs = append(children, child), append(outputs, output)
	}
	var got []string
	for i, child := range children {
		if err := child.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, outputs[i])
		}
		for line := range strings.Lines(outputs[i].String()) {
			if addr, found := strings.CutPrefix(line, "got "); found {
				got = append(got, strings.TrimSpace(addr))
			}
		}
	}
	checkUnique(t, got, processes*perChild)
}

func checkUnique(t *testing.T, addrs []string, want int) {
	t.Helper()
	seen := map[string]bool{}
	for _, addr := range addrs {
		if seen[addr] {
			t.Errorf("%s was assigned twice", addr)
		}
		seen[addr] = true
	}
	if len(addrs) != want {
		t.Errorf("%d addresses were assigned, want %d", len(addrs), want)
	}
}
