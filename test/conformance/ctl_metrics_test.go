package conformance

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestCtlMetricsListen scrapes over HTTP, and ends the server as systemd does.
func TestCtlMetricsListen(t *testing.T) {
	h := newHost(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	cmd := exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), "metrics", "--listen", "127.0.0.1:0")
	stderr, err := cmd.StderrPipe()
	testenv.Must(t, err)
	testenv.Must(t, h.Node.Do(cmd.Start))
	said, err := bufio.NewReader(stderr).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(said), "serving ")
	if err != nil || !ok {
		t.Fatalf("got %q (%v) on stderr, want the address", said, err)
	}
	for range 2 { // each scrape opens the datapath anew
		text, err := testenv.HTTPGet(testenv.Context(t), h.Node, url)
		if err != nil || !strings.Contains(text, "\nebpfnet_attachments{network=\"pods\"} 1\n") {
			t.Errorf("scrape: got %q (%v), want 1 attachment", text, err)
		}
	}
	testenv.Must(t, cmd.Process.Signal(syscall.SIGTERM))
	if err := cmd.Wait(); err != nil {
		t.Errorf("SIGTERM: got %v, want exit code 0", err)
	}
}

// TestCtlMetricsCost counts the system calls of scrapes: flows cost nothing, and containers what it takes to list
// them, unless somebody asks for each.
func TestCtlMetricsCost(t *testing.T) {
	const manyFlows, manyContainers = 60_000, 10

	h := newHost(t)
	trace := filepath.Join(t.TempDir(), "trace")
	calls := func(flags ...string) int {
		t.Helper()
		args := append([]string{"-f", "-qq", "-o", trace, "-e", "trace=bpf,sendto,recvmsg,recvfrom,%file", testenv.Build(t, "./cmd/ebpfnetctl"), "metrics"}, flags...)
		if _, err := h.Node.Run(testenv.Context(t), "strace", args...); err != nil {
			t.Fatal(err)
		}
		text := testenv.ReadFile(t, trace)
		return len(systemCall.FindAll(text, -1))
	}
	pod := func(n int) { h.pod(t, fmt.Sprint("c", n), with(dual("1.1.0"), "maxFlows", 2*manyFlows)).add(t) }
	pod(0)
	few, fewEach := calls(), calls("--containers")
	for n := range manyContainers {
		pod(n + 1)
	}
	fillFlows(t, h, manyFlows)
	if many := calls(); few < 100 || many > few+5 {
		t.Errorf("got %d system calls with 1 container, and %d with %d and %d flows; want the same but for parts of lists", few, many, manyContainers+1, manyFlows)
	}
	if each := (calls("--containers") - fewEach) / manyContainers; each < 1 || each > 4 {
		t.Errorf("--containers: got %d system calls for each, want 1 to 4", each)
	}
	text := mustCtl(t, h, "metrics", "--flows")
	for _, want := range []string{fmt.Sprintf("ebpfnet_flows{state=\"ESTABLISHED\"} %d.0\n", manyFlows), "ebpfnet_flow_table_used_ratio 0.5\n"} {
		if !strings.Contains(text, want) {
			t.Errorf("--flows: want %q in:\n%s", want, text)
		}
	}
}

// systemCall is one line of strace, without the second half of a call that another thread has interrupted.
var systemCall = regexp.MustCompile(`(?m)^\d+ +\w+\(`)

// fillFlows adds flows of the host that have just been used.
func fillFlows(t *testing.T, h *host, n int) {
	t.Helper()
	const farFuture = 1 << 30 // ticks: never idle
	h.withDatapath(t, func(d *loader.Datapath) error {
		keys, values := make([]uint32, n), make([]bpf.FlowEntry, n)
		buckets := map[uint32]bpf.FlowBucket{}
		for i := range keys {
			keys[i] = uint32(i)
			values[i].Key = bpf.FlowKey{RemotePort: uint16(i), LocalPort: uint16(i >> 16), Protocol: 6, Kind: bpf.FlowSNAT}
			values[i].Flow = bpf.Flow{State: bpf.FlowEstablished, LastSeen: farFuture}
			bucket := buckets[uint32(i/flowWays)]
			bucket.Id[i%flowWays] = uint32(i + 1)
			buckets[uint32(i/flowWays)] = bucket
		}
		_, err := d.FlowTable.BatchUpdate(keys, values, nil)
		for number, bucket := range buckets {
			err = errors.Join(err, d.FlowBuckets.Put(number, bucket))
		}
		return err
	})
}

const flowWays = len(bpf.FlowBucket{}.Id)

const metricFiles = repository + "/plugin/metrics/"

// TestDashboardAndAlerts holds each expression of the dashboard and of the alert rules to what ebpfnetctl exports: the
// names of metrics and labels, the reasons of drops, and rates of counters alone.
func TestDashboardAndAlerts(t *testing.T) {
	x := newExported(t)
	rules, errs := rulefmt.ParseFile(metricFiles+"alerts.yml", false, model.UTF8Validation)
	if len(errs) > 0 {
		t.Fatalf("alerts.yml: %v", errs)
	}
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			x.check(t, rule.Alert, rule.Expr)
			x.checkTemplates(t, rule.Alert, slices.Collect(maps.Values(rule.Annotations))...)
		}
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
		Templating struct {
			List []struct{ Name, Definition string }
		}
	}
	if err := json.Unmarshal(testenv.ReadFile(t, metricFiles+"dashboard.json"), &dashboard); err != nil || len(dashboard.Panels) < 10 {
		t.Fatalf("dashboard.json: got %d panels (%v)", len(dashboard.Panels), err)
	}
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			x.check(t, panel.Title, strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"))
			x.checkTemplates(t, panel.Title, target.LegendFormat)
		}
	}
	for _, variable := range dashboard.Templating.List {
		if inner := regexp.MustCompile(`^label_values\((.*), (job|instance)\)$`).FindStringSubmatch(variable.Definition); inner != nil {
			x.check(t, "variable "+variable.Name, inner[1])
		} else if variable.Name != "datasource" {
			t.Errorf("variable %s: got %q, want label_values", variable.Name, variable.Definition)
		}
	}
	if x.checked < 30 {
		t.Errorf("got %d expressions, want all of two files", x.checked)
	}
}

// exported is what a host exports.
type exported struct {
	types   map[string]dto.MetricType  // by metric
	labels  map[string]map[string]bool // by metric
	reasons map[string]bool
	checked int
}

// newExported exports all metrics of a live host, and adds those of node_exporter.
func newExported(t *testing.T) *exported {
	t.Helper()
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	testenv.Must(t, p.SendFrames(testenv.PodIfName, make([]byte, 60))) // a drop of its own
	h.awaitForged(t, 1)
	dir := t.TempDir()
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "10.conflist"), exampleConflist(t), 0o600))
	file := filepath.Join(dir, "ebpfnet.prom")
	mustCtl(t, h, "metrics", "--containers", "--flows", "--conf-dir", dir, "--textfile", file)
	textParser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := textParser.TextToMetricFamilies(strings.NewReader(string(testenv.ReadFile(t, file))))
	testenv.Must(t, err)
	x := &exported{map[string]dto.MetricType{}, map[string]map[string]bool{}, map[string]bool{}, 0}
	for reason := range bpf.ReasonMax { // a host exports those that have occurred
		x.reasons[ebpfmaps.Reason(reason).Name()] = true
	}
	for name, family := range families {
		x.types[name], x.labels[name] = family.GetType(), map[string]bool{"job": true, "instance": true}
		for _, metric := range family.Metric {
			for _, label := range metric.Label {
				x.labels[name][label.GetName()] = true
			}
		}
	}
	for name, own := range map[string][]string{ // of the node agent
		"ebpfnet_node_ready": nil, "ebpfnet_policy_event_to_kernel_seconds_bucket": {"le"}, "ebpfnet_policy_denied_packets_total": {"namespace", "policy", "direction"},
	} {
		x.types[name], x.labels[name] = dto.MetricType_COUNTER, map[string]bool{"job": true, "instance": true}
		for _, label := range own {
			x.labels[name][label] = true
		}
	}
	x.types["ebpfnet_node_ready"] = dto.MetricType_GAUGE
	x.types["node_textfile_mtime_seconds"] = dto.MetricType_GAUGE
	x.labels["node_textfile_mtime_seconds"] = map[string]bool{"job": true, "instance": true, "file": true}
	return x
}

// check checks one expression.
func (x *exported) check(t *testing.T, where, text string) {
	t.Helper()
	x.checked++
	expr, err := parser.ParseExpr(text)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	known := map[string]bool{}
	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		if x.labels[selector.Name] == nil {
			t.Errorf("%s: no metric %s is exported", where, selector.Name)
		}
		maps.Copy(known, x.labels[selector.Name])
		for _, matcher := range selector.LabelMatchers {
			x.checkMatcher(t, where, selector.Name, matcher)
		}
		isCounter := x.types[selector.Name] == dto.MetricType_COUNTER
		inRate := slices.ContainsFunc(path, func(node parser.Node) bool {
			call, ok := node.(*parser.Call)
			return ok && slices.Contains([]string{"rate", "increase"}, call.Func.Name)
		})
		isZero := slices.ContainsFunc(path, func(node parser.Node) bool { // stands for a series that does not exist yet
			product, ok := node.(*parser.BinaryExpr)
			return ok && product.Op == parser.MUL && product.RHS.String() == "0"
		})
		if isCounter != inRate && !isZero {
			t.Errorf("%s: %s is a counter: %v; its rate is taken: %v", where, selector.Name, isCounter, inRate)
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		var used []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			used = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = n.VectorMatching.MatchingLabels
			}
		}
		for _, label := range used {
			if !known[label] {
				t.Errorf("%s: no metric in %s has label %s", where, text, label)
			}
		}
		return nil
	})
}

func (x *exported) checkMatcher(t *testing.T, where, metric string, m *labels.Matcher) {
	t.Helper()
	if m.Name != model.MetricNameLabel && !x.labels[metric][m.Name] {
		t.Errorf("%s: %s has no label %s", where, metric, m.Name)
	}
	if m.Name != "reason" {
		return
	}
	for reason := range strings.SplitSeq(m.Value, "|") {
		if !x.reasons[reason] {
			t.Errorf("%s: no drop has reason %q", where, reason)
		}
	}
}

// checkTemplates checks the names of labels in texts, where {{ $labels.x }} or {{x}} stands for one.
func (x *exported) checkTemplates(t *testing.T, where string, texts ...string) {
	t.Helper()
	for _, text := range texts {
		for _, match := range regexp.MustCompile(`{{\s*(?:\$labels\.)?(\w+)\s*}}`).FindAllStringSubmatch(text, -1) {
			has := func(labels map[string]bool) bool { return labels[match[1]] }
			if !slices.ContainsFunc(slices.Collect(maps.Values(x.labels)), has) {
				t.Errorf("%s: no metric has the label of %s", where, match[0])
			}
		}
	}
}
