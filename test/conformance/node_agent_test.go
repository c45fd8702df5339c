package conformance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestNodeAgent makes ADD and STATUS wait for a cluster's node agent, and says what that waits for. DEL does not wait.
func TestNodeAgent(t *testing.T) {
	h := newHost(t)
	state := filepath.Join(t.TempDir(), "node.json")
	conf := with(dual("1.1.0"), "cluster", state)
	p := h.pod(t, "c1", conf)
	before := h.snapshot(t, p.Namespace)
	for _, agent := range []struct{ state, why string }{
		{"", "is its pod of this node running?"}, // without a file
		{`{"node": "a", "error": "the API has no node a"}`, "the API has no node a"},
		{`{"node": "a"`, "unexpected end of JSON input"},
	} {
		if agent.state != "" {
			h.writeState(t, state, agent.state)
		}
		wantError(t, h.status(t, conf), codeNotAvailable, "the node agent has not synced since boot", agent.why)
		wantError(t, p.try(t, "ADD"), codeTryAgain, "the node agent has not synced since boot", agent.why)
		p.del(t)
		h.wantUnchanged(t, before, p.Namespace)
	}
	h.writeState(t, state, `{"node": "a", "synced": "2026-01-02T03:04:05Z", "error": "connection refused"}`)
	wantSuccess(t, h.status(t, conf), "")
	p.add(t)
	testenv.Must(t, os.Remove(state))
	p.del(t)
	h.wantUnchanged(t, before, p.Namespace)
	wantError(t, h.status(t, with(conf, "cluster", "node.json")), codeInvalidConfig, `cluster "node.json": expected the absolute path`)
}

func (h *host) writeState(t *testing.T, path, content string) {
	t.Helper()
	testenv.Must(t, os.WriteFile(path, []byte(content), 0o600))
}
