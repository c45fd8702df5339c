// Package conformance runs the built plugin as container runtimes do (bare, through
// libcni, by the CNI project's own cnitool) and holds it to the CNI specification.
//
// Every test compares the node, its containers, the files of the addresses and the
// maps before and after ([state]): what a call should not change must be the same.
package conformance

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(roleEnv) != "" {
		os.Exit(playPlugin())
	}
	testenv.Main(m)
}

// addressDir is where the addresses of all networks are kept, by host-local's default.
const addressDir = "/var/lib/cni/networks"

// host is a machine with the plugin.
type host struct {
	*testenv.Topology
	plugin string
	path   string // CNI_PATH of containers
}

// newHost makes a machine on which the plugin has not run yet. At the end of the test
// it checks that nothing but the datapath itself is pinned, and removes that.
func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{plugin: testenv.Build(t, "./cmd/ebpfnet"), path: "/opt/cni/bin"}
	t.Cleanup(func() {
		checkPins(t)
		if left, _ := filepath.Glob("*.log"); len(left) > 0 {
			t.Errorf("left in the working directory: %v", left)
		}
		if err := errors.Join(os.RemoveAll(loader.Root), os.RemoveAll(addressDir), os.RemoveAll(record.DefaultDir)); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	h.Topology = testenv.NewTopology(t)
	return h
}

// checkPins fails the test for pins that belong to no loaded datapath, once all
// containers are gone.
func checkPins(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir(loader.Root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if !isDatapathPin(strings.TrimPrefix(path, loader.Root)) {
			t.Errorf("left in bpffs: %s", path)
		}
		return nil
	})
	if err != nil {
		t.Errorf("walk the pins: %v", err)
	}
}

// isDatapathPin knows the layout /<namespace>/<maps|progs|links>/<pin>.
func isDatapathPin(path string) bool {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	if strings.HasPrefix(parts[0], "tmp-") {
		return false
	}
	return len(parts) < 3 || parts[1] != "links" || strings.HasPrefix(parts[2], "uplink-")
}

// call is an execution of the plugin with exactly this environment and input.
func (h *host) call(t *testing.T, env map[string]string, stdin []byte) *testenv.Call {
	t.Helper()
	call, err := h.Node.Invoke(testenv.Context(t), h.plugin, env, stdin)
	if err != nil {
		t.Fatal(err)
	}
	return call
}

// wantSuccess fails the test unless the plugin exited with 0 and said nothing but out
// on its outputs.
func wantSuccess(t *testing.T, call *testenv.Call, out string) {
	t.Helper()
	if call.Exit != 0 || len(call.Stderr) != 0 || out != anything && string(call.Stdout) != out {
		t.Fatalf("%s exited with %d: stdout %q, want %q; stderr %q",
			call.Getenv("CNI_COMMAND"), call.Exit, call.Stdout, out, call.Stderr)
	}
}

// anything is a text of [wantSuccess] that every output fits.
const anything = "<anything>"

// wantError fails the test unless the plugin exited with another status than 0, and its
// output is one error of the specification with this code whose text has all of the words.
func wantError(t *testing.T, call *testenv.Call, code uint, words ...string) {
	t.Helper()
	verb := call.Getenv("CNI_COMMAND")
	if call.Exit == 0 {
		t.Errorf("%s succeeded, want code %d: stdout %q", verb, code, call.Stdout)
		return
	}
	var failure types.Error
	if err := json.Unmarshal(call.Stdout, &failure); err != nil {
		t.Errorf("%s: stdout is not one JSON document (%v): %q", verb, err, call.Stdout)
		return
	}
	if failure.Code != code {
		t.Errorf("%s: code %d, want %d: %v", verb, failure.Code, code, &failure)
	}
	text := failure.Msg + "\n" + failure.Details
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: error lacks %q: %s", verb, word, text)
		}
	}
	if len(call.Stderr) != 0 {
		t.Errorf("%s: stderr: %s", verb, call.Stderr)
	}
}
