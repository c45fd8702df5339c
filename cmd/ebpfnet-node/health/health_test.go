package health

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

const stuck = 3 * time.Minute

// get returns the status and the text of an answer.
func get(t *testing.T, h *Health, path string) (int, string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	h.Handler(http.NotFoundHandler()).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
	text, err := io.ReadAll(recorder.Body)
	if err != nil {
		t.Fatal(err)
	}
	return recorder.Code, strings.TrimSpace(string(text))
}

// TestReady follows the last report, and says what is wrong in one line.
func TestReady(t *testing.T) {
	h := New(stuck)
	for _, test := range []struct {
		name   string
		report *Report
		code   int
		text   string
	}{
		{"start", nil, http.StatusServiceUnavailable, "starting"},
		{"waiting", &Report{Err: errors.New("no nodes yet")}, http.StatusServiceUnavailable, "no nodes yet"},
		{"synced", &Report{Took: time.Millisecond}, http.StatusOK, "ok"},
		{"API down", &Report{Took: time.Millisecond, API: errors.New("refused")}, http.StatusOK, "ok"},
		{"failed", &Report{Took: time.Millisecond, Err: errors.New("add route\nto \x1b[2J")}, http.StatusServiceUnavailable, `add route; to \x1b[2J`},
		{"problems", &Report{Took: time.Millisecond, Problems: []string{"a", "b"}}, http.StatusServiceUnavailable, "a; b"},
		{"mended", &Report{Took: time.Millisecond}, http.StatusOK, "ok"},
	} {
		if test.report != nil {
			h.Set(*test.report)
		}
		if code, text := get(t, h, "/readyz"); code != test.code || text != test.text {
			t.Errorf("%s: got %d %q, want %d %q", test.name, code, text, test.code, test.text)
		}
		if code, text := get(t, h, "/healthz"); code != http.StatusOK || text != "ok" {
			t.Errorf("%s: got health %d %q, want %d", test.name, code, text, http.StatusOK)
		}
	}
}

// TestStuck is for an agent whose loop does not come round, whatever its last report was.
func TestStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(stuck)
		time.Sleep(stuck) // synctest's clock
		if code, _ := get(t, h, "/healthz"); code != http.StatusOK {
			t.Errorf("in time: got %d, want %d", code, http.StatusOK)
		}
		time.Sleep(time.Second)
		if code, text := get(t, h, "/healthz"); code != http.StatusServiceUnavailable || text != "no sync has ended for 3m1s" {
			t.Errorf("late: got %d %q, want %d", code, text, http.StatusServiceUnavailable)
		}
		h.Set(Report{Err: errors.New("an error is a sign of life")})
		if code, _ := get(t, h, "/healthz"); code != http.StatusOK {
			t.Errorf("again: got %d, want %d", code, http.StatusOK)
		}
	})
}

// TestMetrics counts what syncs have done.
func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := New(stuck)
		h.Set(Report{Err: errors.New("waiting")})
		h.Set(Report{Took: time.Second, Changes: 5, Lost: 2, Tunnel: 3, Direct: 1, Skipped: 2})
		h.Set(Report{Took: 2 * time.Second, Changes: 2, Lost: 1, Err: errors.New("failed"), API: errors.New("down"), Tunnel: 4, Problems: []string{"a"}})
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(h)
		want := `
# HELP ebpfnet_node_api_up Whether the API server answered the last request.
# TYPE ebpfnet_node_api_up gauge
ebpfnet_node_api_up 0
# HELP ebpfnet_node_changes_total Changes of routes, addresses, devices and entries since the agent's start.
# TYPE ebpfnet_node_changes_total counter
ebpfnet_node_changes_total 7
# HELP ebpfnet_node_direct_lost_total How often direct probes of a node on a link were lost, so that both changed to the tunnel, since the agent's start.
# TYPE ebpfnet_node_direct_lost_total counter
ebpfnet_node_direct_lost_total 3
# HELP ebpfnet_node_last_sync_timestamp_seconds When this host was last in the desired state; 0: not since the agent's start.
# TYPE ebpfnet_node_last_sync_timestamp_seconds gauge
ebpfnet_node_last_sync_timestamp_seconds 9.466848e+08
# HELP ebpfnet_node_problems Problems that keep other nodes from reaching this node's containers; /readyz lists them.
# TYPE ebpfnet_node_problems gauge
ebpfnet_node_problems 1
# HELP ebpfnet_node_ready Whether this host is in the desired state.
# TYPE ebpfnet_node_ready gauge
ebpfnet_node_ready 0
# HELP ebpfnet_node_sync_errors_total Syncs that have failed since the agent's start.
# TYPE ebpfnet_node_sync_errors_total counter
ebpfnet_node_sync_errors_total 1
# HELP ebpfnet_node_sync_seconds How long the last sync took.
# TYPE ebpfnet_node_sync_seconds gauge
ebpfnet_node_sync_seconds 2
# HELP ebpfnet_peer_prefixes Prefixes of other nodes, by how they are reached; skipped: not, or not as they should be.
# TYPE ebpfnet_peer_prefixes gauge
ebpfnet_peer_prefixes{mode="direct"} 0
ebpfnet_peer_prefixes{mode="skipped"} 0
ebpfnet_peer_prefixes{mode="tunnel"} 4
`
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want)); err != nil {
			t.Error(err)
		}
		if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
			t.Errorf("got problems %v (%v), want none", problems, err)
		}
	})
}
