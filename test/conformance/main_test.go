// Package conformance calls the built plugin as container runtimes do, directly and through
// the CNI project's cnitool, and compares its behaviour with the CNI specification.
//
// Most tests take a snapshot of the node and its containers before and after a call, and
// want nothing to differ that the call must not change.
package conformance

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// long is for test-long.
var long = flag.Bool("long", false, "kill calls at each of their system calls, not at some of them")

func TestMain(m *testing.M) {
	if os.Getenv(faultEnv) != "" {
		os.Exit(runAsPlugin())
	}
	if os.Getenv(conmonEnv) != "" {
		os.Exit(runAsConmon())
	}
	testenv.Main(m)
}

// The specification's error codes under short names, for tables.
const (
	codeIncompatible  = types.ErrIncompatibleCNIVersion
	codeUnsupported   = types.ErrUnsupportedField
	codeInvalidEnv    = types.ErrInvalidEnvironmentVariables
	codeDecoding      = types.ErrDecodingFailure
	codeInvalidConfig = types.ErrInvalidNetworkConfig
	codeInvalidNetNS  = types.ErrInvalidNetNS
	codeTryAgain      = types.ErrTryAgainLater
	codeNotAvailable  = types.ErrPluginNotAvailable
	codeIO            = types.ErrIOFailure
	codeInternal      = types.ErrInternal
)

// host is a node with the plugin.
type host struct {
	*testenv.Topology
	plugin string
	path   string // CNI_PATH
	loads  bool   // an ADD without a datapath loads one: see [testenv.Preload]
}

// newHost makes a machine on which the plugin has not run yet. The end of the test checks that
// its containers left nothing behind, and leaves the datapath, without entries, to another test's node.
func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{Topology: testenv.NewTopology(t), plugin: testenv.Build(t, "./cmd/ebpfnet"), path: "/opt/cni/bin"}
	t.Cleanup(func() {
		h.wantNothingLeft(t)
		if !t.Failed() {
			testenv.Recycle(t, h.Node)
		}
		if err := errors.Join(os.RemoveAll(loader.Root), os.RemoveAll(testenv.ReservationDir), os.RemoveAll(record.DefaultDir)); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return h
}

// newLoadingHost is newHost for a test of loading: its first ADD does it, too.
func newLoadingHost(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	h.loads = true
	return h
}

// newLoadedHost is newHost after an ADD and a DEL, which have loaded the datapath and created all lock files.
func newLoadedHost(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	p := h.pod(t, "c0", dual("1.1.0"))
	p.add(t)
	p.del(t)
	return h
}

// wantNothingLeft fails the test for everything that containers have left on the node, and for log files in
// the working directory.
func (h *host) wantNothingLeft(t *testing.T) {
	t.Helper()
	left, err := testenv.Leftovers(h.Node)
	testenv.NoError(t, err)
	for _, thing := range left {
		t.Errorf("left behind: %s", thing)
	}
	if logs, _ := filepath.Glob("*.log"); len(logs) > 0 {
		t.Errorf("left in the working directory: %v", logs)
	}
}

// call executes the plugin with exactly this environment and input.
func (h *host) call(t *testing.T, env map[string]string, stdin []byte) *testenv.Call {
	t.Helper()
	call, err := h.Node.Invoke(testenv.Context(t), h.plugin, env, stdin)
	testenv.Must(t, err)
	return call
}

// wantSuccess wants the plugin to exit with 0, to print out and nothing on stderr.
func wantSuccess(t *testing.T, call *testenv.Call, out string) {
	t.Helper()
	if call.Exit != 0 || len(call.Stderr) != 0 || out != anything && string(call.Stdout) != out {
		t.Fatalf("%s: got exit code %d, stdout %q, stderr %q; want 0, %q, none",
			call.Getenv("CNI_COMMAND"), call.Exit, call.Stdout, call.Stderr, out)
	}
}

// anything makes [wantSuccess] accept every output.
const anything = "<anything>"

// wantError wants the plugin to fail and to print one error of the specification, with this code and a
// text that contains all of the words.
func wantError(t *testing.T, call *testenv.Call, code uint, words ...string) {
	t.Helper()
	verb := call.Getenv("CNI_COMMAND")
	if call.Exit == 0 {
		t.Errorf("%s: got success (%q), want code %d", verb, call.Stdout, code)
		return
	}
	var failure types.Error
	if err := json.Unmarshal(call.Stdout, &failure); err != nil {
		t.Errorf("%s: stdout is not one JSON document (%v): %q", verb, err, call.Stdout)
		return
	}
	if failure.Code != code {
		t.Errorf("%s: got code %d, want %d: %v", verb, failure.Code, code, &failure)
	}
	text := failure.Msg + "\n" + failure.Details
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%s: got error %q, want it to contain %q", verb, text, word)
		}
	}
	if len(call.Stderr) != 0 {
		t.Errorf("%s: got %q on stderr, want nothing", verb, call.Stderr)
	}
}
