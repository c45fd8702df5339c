// Package health reports the agent's state to the kubelet and Prometheus.
package health

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Report is the outcome of one sync.
type Report struct {
	Err      error         // why it failed; nil: the host is in the desired state
	Problems []string      // why other nodes do not reach this node's containers
	Pending  error         // why the plugin does not add containers yet
	API      error         // why the nodes may be out of date. The agent stays ready: packets flow
	Took     time.Duration // 0: nothing was tried
	Changes  int
	Tunnel   int // prefixes of other nodes that are reached by the tunnel
	Direct   int // prefixes that are reached directly
	Skipped  int // prefixes that are not reached, or not as they should be
	Lost     int // nodes that have no direct way any more since the last report
	Refused  int // skipped prefixes that the kernel refuses; the agent tries them again
}

// Reasons returns why this node is not in the desired state, or "".
func (r Report) Reasons() string { return strings.Join(r.reasons(), "; ") }

func (r Report) reasons() (reasons []string) {
	for _, err := range []error{r.Err, r.Pending} {
		if err != nil {
			reasons = append(reasons, err.Error())
		}
	}
	return append(reasons, r.Problems...)
}

// Health collects reports. Its methods are for any goroutine.
type Health struct {
	stuck time.Duration

	mu       sync.Mutex
	beat     time.Time // of the last report
	success  time.Time
	last     Report
	policy   error // why NetworkPolicies are not enforced as they are
	errors   float64
	changes  float64
	lost     float64
	duration float64
}

// New returns the health of an agent that has not synced. It is stuck after that time without a report.
func New(stuck time.Duration) *Health {
	return &Health{stuck: stuck, beat: time.Now(), last: Report{Err: fmt.Errorf("starting")}}
}

// Set records a report.
func (h *Health) Set(r Report) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.beat, h.last = time.Now(), r
	if r.Took == 0 {
		return
	}
	h.changes += float64(r.Changes)
	h.lost += float64(r.Lost)
	h.duration = r.Took.Seconds()
	switch {
	case r.Err != nil:
		h.errors++
	case r.Refused == 0:
		h.success = h.beat
	}
}

// SetPolicy records why NetworkPolicies are not enforced as they are, or nil.
func (h *Health) SetPolicy(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.policy = err
}

// Handler answers /healthz and /readyz, and has metrics answer /metrics.
func (h *Health) Handler(metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, h.sick()) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, h.unready()) })
	mux.Handle("GET /metrics", metrics)
	return mux
}

// answer writes ok, or the reasons, which may contain text of others.
func answer(w http.ResponseWriter, reasons []string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if len(reasons) == 0 {
		fmt.Fprintln(w, "ok")
		return
	}
	w.WriteHeader(http.StatusServiceUnavailable)
	fmt.Fprintln(w, show.Message(strings.Join(reasons, "; ")))
}

// sick returns why a restart might help.
func (h *Health) sick() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if silent := time.Since(h.beat); silent > h.stuck {
		return []string{fmt.Sprintf("no sync has ended for %v", silent.Round(time.Second))}
	}
	return nil
}

// unready returns why this node is not in the desired state.
func (h *Health) unready() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	reasons := h.last.reasons()
	if h.policy != nil {
		reasons = append(reasons, h.policy.Error())
	}
	return reasons
}

// The metrics. A published name must not change.
var (
	peers    = desc("peer_prefixes", "Prefixes of other nodes, by how they are reached; skipped: not, or not as they should be.", "mode")
	ready    = desc("node_ready", "Whether this host is in the desired state.")
	api      = desc("node_api_up", "Whether the API server answered the last request.")
	problems = desc("node_problems", "Problems that keep other nodes from reaching this node's containers; /readyz lists them.")
	syncs    = desc("node_last_sync_timestamp_seconds", "When this host was last in the desired state; 0: not since the agent's start.")
	duration = desc("node_sync_seconds", "How long the last sync took.")
	failures = desc("node_sync_errors_total", "Syncs that have failed since the agent's start.")
	changes  = desc("node_changes_total", "Changes of routes, addresses, devices and entries since the agent's start.")
	lost     = desc("node_direct_lost_total", "How often direct probes of a node on a link were lost, so that both changed to the tunnel, since the agent's start.")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("ebpfnet_"+name, help, labels, nil)
}

// Describe sends all metrics.
func (h *Health) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{peers, ready, api, problems, syncs, duration, failures, changes, lost} {
		to <- d
	}
}

// Collect sends the figures.
func (h *Health) Collect(to chan<- prometheus.Metric) {
	isReady := len(h.unready()) == 0
	h.mu.Lock()
	defer h.mu.Unlock()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(peers, float64(h.last.Tunnel), "tunnel")
	gauge(peers, float64(h.last.Direct), "direct")
	gauge(peers, float64(h.last.Skipped), "skipped")
	gauge(ready, boolean(isReady))
	gauge(api, boolean(h.last.API == nil))
	gauge(problems, float64(len(h.last.Problems)))
	gauge(syncs, seconds(h.success))
	gauge(duration, h.duration)
	to <- prometheus.MustNewConstMetric(failures, prometheus.CounterValue, h.errors)
	to <- prometheus.MustNewConstMetric(changes, prometheus.CounterValue, h.changes)
	to <- prometheus.MustNewConstMetric(lost, prometheus.CounterValue, h.lost)
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
