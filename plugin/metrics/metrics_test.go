package metrics

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

// full is a host with a sample of every metric.
func full() source {
	entries := 7
	drops := []maps.DropCount{{Reason: maps.Reason(bpf.ReasonMAC), Packets: 3, Bytes: 180}, {Reason: maps.Reason(bpf.ReasonARP)}}
	attachment := func(id string) maps.Attachment {
		return maps.Attachment{Network: "pods", ContainerID: id, IfName: "eth0"}
	}
	totals := &admin.Totals{
		Uplinks:      []string{"eth0"},
		Warnings:     []string{"a warning"},
		Maps:         []admin.MapUse{{Name: "endpoints", Entries: &entries, MaxEntries: 65536, Bytes: 1 << 20}, {Name: "flow_table", MaxEntries: 1024}},
		FlowTableUse: 0.25,
		Drops:        drops,
		Networks:     map[string]admin.NetworkTotals{"pods": {Connected: 2, Dead: 1}},
		Flows:        map[string]int{"ESTABLISHED": 5},
		Containers: []admin.ContainerTotals{
			{Attachment: attachment("web"), Device: "ebpf1", InBytes: 1, Drops: drops},
			{Owner: "00000000000000ff", Device: "ebpf2"},
		},
	}
	totals.Config.Attach = uint32(bpf.AttachTCX)
	subnet := netip.MustParsePrefix("fd00::/64")
	set := ipam.RangeSet{{Subnet: subnet, Start: subnet.Addr().Next(), End: subnet.Addr().Next()}}
	return source{
		totals: func() (*admin.Totals, error) { return totals, nil },
		pools: func() ([]pool, error) {
			return []pool{{"pods", []ipam.Usage{{Ranges: set, Addresses: math.Exp2(64), Reserved: 2}}}}, nil
		},
	}
}

func textOf(t *testing.T, from source, format expfmt.FormatType) string {
	t.Helper()
	var text strings.Builder
	if err := write(&text, prometheus.GathererFunc(from.gather), expfmt.NewFormat(format)); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

func wantLines(t *testing.T, text string, lines ...string) {
	t.Helper()
	have := strings.Split(text, "\n")
	for _, line := range lines {
		if !slices.Contains(have, line) {
			t.Errorf("want %s in:\n%s", line, text)
		}
	}
}

// TestFormats wants OpenMetrics, and the format that node_exporter reads.
func TestFormats(t *testing.T) {
	open, plain := textOf(t, full(), expfmt.TypeOpenMetrics), textOf(t, full(), expfmt.TypeTextPlain)
	same := []string{
		`ebpfnet_datapath_loaded 1`,
		`ebpfnet_drops_total{reason="mac"} 3`,
		`ebpfnet_attachments{network="pods"} 2`,
		`ebpfnet_dead_attachments{network="pods"} 1`,
		`ebpfnet_map_entries{map="endpoints"} 7`,
		`ebpfnet_container_receive_bytes_total{container_id="web",interface="eth0",network="pods"} 1`,
		`ebpfnet_container_info{container_id="00000000000000ff",device="ebpf2",interface="",network=""} 1`,
		`ebpfnet_addresses_reserved{network="pods",range="fd00::1-fd00::1"} 2`,
	}
	wantLines(t, plain, append(same, "# TYPE ebpfnet_drops_total counter")...)
	wantLines(t, open, "# TYPE ebpfnet_drops counter", "# EOF", `ebpfnet_attachments{network="pods"} 2.0`,
		`ebpfnet_drops_total{reason="mac"} 3.0`)
	for _, absent := range []string{
		"# EOF",                         // the end of OpenMetrics
		`map_entries{map="flow_table"}`, // not counted
		`reason="arp"`,                  // never occurred
		"ebpfnet_addresses{",            // a range that no host can use up
	} {
		if strings.Contains(plain, absent) {
			t.Errorf("got %s in:\n%s", absent, plain)
		}
	}
	problems, err := promlint.New(strings.NewReader(plain)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: got %v (%v), want none", problems, err)
	}
}

// TestHostileNames has names that end a line, a label or UTF-8, and two that look the same.
func TestHostileNames(t *testing.T) {
	from := full()
	totals, _ := from.totals()
	totals.Networks = map[string]admin.NetworkTotals{
		"a\"} 9\nebpfnet_up 1\n": {Connected: 1},
		"\x1b[2J":                {Connected: 2},
		`\x1b[2J`:                {Connected: 3}, // looks like the one before
		"\xff":                   {Connected: 4},
		strings.Repeat("n", 255): {Connected: 5},
	}
	web := totals.Containers[0]
	web.ContainerID = "\u202eweb\x00"
	totals.Containers = []admin.ContainerTotals{web, web, {Attachment: web.Attachment, Device: "\\\""}}
	text := textOf(t, from, expfmt.TypeTextPlain)
	wantLines(t, text,
		`ebpfnet_attachments{network="a\"} 9\\nebpfnet_up 1\\n"} 1`,
		`ebpfnet_attachments{network="\\x1b[2J"} 5`,
		`ebpfnet_attachments{network="\\xff"} 4`,
		`ebpfnet_container_receive_bytes_total{container_id="\\u202eweb\\x00",interface="eth0",network="pods"} 2`,
		`ebpfnet_container_info{container_id="\\u202eweb\\x00",device="ebpf1",interface="eth0",network="pods"} 1`,
	)
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "# ") && !strings.HasPrefix(line, "ebpfnet_") || strings.HasPrefix(line, "ebpfnet_up ") || strings.ContainsAny(line, "\x1b\x00\u202e") {
			t.Errorf("got line %q", line)
		}
	}
}

// TestFailures wants all of the metrics or none.
func TestFailures(t *testing.T) {
	bad := errors.New("no \x1b access")
	for name, from := range map[string]source{
		"totals": {func() (*admin.Totals, error) { return nil, bad }, full().pools},
		"pools":  {full().totals, func() ([]pool, error) { return nil, bad }},
	} {
		var text strings.Builder
		if err := Write(&text, prometheus.GathererFunc(from.gather)); err == nil || err.Error() != `no \x1b access` || text.Len() > 0 {
			t.Errorf("%s: got %v, %q; want the error and nothing", name, err, text.String())
		}
	}
	notLoaded := source{func() (*admin.Totals, error) { return nil, loader.ErrNotLoaded }, full().pools}
	text := textOf(t, notLoaded, expfmt.TypeTextPlain)
	wantLines(t, text, "ebpfnet_datapath_loaded 0")
	if strings.Contains(text, "ebpfnet_attachments") {
		t.Errorf("not loaded: got %s, want no attachments", text)
	}
}

// TestTextfile replaces a file, and leaves it alone after an error. Neither leaves another file behind.
func TestTextfile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "ebpfnet.prom")
	if err := os.WriteFile(file, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := func(content string, mode os.FileMode) {
		t.Helper()
		text, err := os.ReadFile(file)
		info, errStat := os.Stat(file)
		files, _ := os.ReadDir(dir)
		if err := errors.Join(err, errStat); err != nil || !strings.Contains(string(text), content) || info.Mode() != mode || len(files) != 1 {
			t.Fatalf("got %q, mode %v, %v (%v); want %q, %v, and no other file", text, info.Mode(), files, err, content, mode)
		}
	}
	failing := prometheus.GathererFunc(source{func() (*admin.Totals, error) { return nil, errors.New("fault") }, full().pools}.gather)
	if err := prometheus.WriteToTextfile(file, failing); err == nil {
		t.Error("got no error of the source")
	}
	want("old", 0o600)
	if err := prometheus.WriteToTextfile(file, prometheus.GathererFunc(full().gather)); err != nil {
		t.Fatal(err)
	}
	want("ebpfnet_datapath_loaded 1\n", 0o644)
	if err := os.Mkdir(filepath.Join(dir, "sub.prom"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := prometheus.WriteToTextfile(filepath.Join(dir, "sub.prom"), prometheus.GathererFunc(full().gather)); err == nil {
		t.Error("a directory in its place: got no error")
	}
	if err := prometheus.WriteToTextfile(filepath.Join(dir, "missing", "a.prom"), prometheus.GathererFunc(full().gather)); err == nil {
		t.Error("no directory: got no error")
	}
	if files, _ := os.ReadDir(dir); len(files) != 2 {
		t.Errorf("got %v, want no other file", files)
	}
}

// TestServe scrapes in both formats, and ends the server while a client has an open connection.
func TestServe(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	failing := false
	from := func() source {
		if failing {
			return source{func() (*admin.Totals, error) { return nil, errors.New("fault") }, full().pools}
		}
		return full()
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, listener, prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return from().gather() }))
	}()
	get := func(method, path, accept string) (int, string) {
		t.Helper()
		request, err := http.NewRequestWithContext(ctx, method, "http://"+listener.Addr().String()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Accept", accept)
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, string(body)
	}
	for _, test := range []struct {
		method, path, accept string
		status               int
		contains             string
	}{
		{"GET", "/metrics", "", 200, "# TYPE ebpfnet_drops_total counter"},
		{"GET", "/metrics", "application/openmetrics-text; version=1.0.0", 200, "# EOF"},
		{"GET", "/", "", 404, ""},
		{"POST", "/metrics", "", 405, ""},
	} {
		if status, body := get(test.method, test.path, test.accept); status != test.status || !strings.Contains(body, test.contains) {
			t.Errorf("%s %s (%s): got %d, %s; want %d, %s", test.method, test.path, test.accept, status, body, test.status, test.contains)
		}
	}
	failing = true
	if status, body := get("GET", "/metrics", ""); status != 500 || !strings.Contains(body, "fault") || strings.Contains(body, "ebpfnet_") {
		t.Errorf("after a fault: got %d, %s; want 500 and the error alone", status, body)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("end: got %v, want none", err)
	}
	if c, err := net.Dial("tcp", listener.Addr().String()); err == nil {
		c.Close()
		t.Error("it still listens")
	}
}
