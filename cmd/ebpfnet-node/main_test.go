package main

import (
	"bytes"
	"log/slog"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// TestMetricsWithoutDatapath scrapes where the directory of configurations is none: the agent's own metrics remain.
func TestMetricsWithoutDatapath(t *testing.T) {
	var output bytes.Buffer
	o := &options{conflist: filepath.Join("/dev/null", "10-pods.conflist")}
	a := &agent{health: health.New(time.Hour), log: show.NewLogger(&output, slog.LevelInfo)}
	recorder := httptest.NewRecorder()
	o.handler(a).ServeHTTP(recorder, httptest.NewRequest("GET", "/metrics", nil))
	if body := recorder.Body.String(); recorder.Code != 200 || !strings.Contains(body, "ebpfnet_node_ready") {
		t.Errorf("got %d, %s; want the agent's metrics", recorder.Code, body)
	}
	if !strings.Contains(output.String(), "/dev/null") {
		t.Errorf("log: got %q, want why", output.String())
	}
}
