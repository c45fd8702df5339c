package main

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestHistogram(t *testing.T) {
	var h histogram
	if got := h.quantile(0.5); got != 0 {
		t.Errorf("of none: %v", got)
	}
	for i := range 99 {
		h.add(time.Duration(i+1) * time.Microsecond)
	}
	h.add(4 * time.Millisecond)
	h.add(time.Second)
	for q, want := range map[float64]time.Duration{
		0.01: 2 * time.Microsecond, 0.5: 51 * time.Microsecond, 0.98: 99 * time.Microsecond, 0.99: 4 * time.Millisecond, 1: begin(buckets - 1),
	} {
		if got := h.quantile(q); got != want {
			t.Errorf("quantile %v: %v, want %v", q, got, want)
		}
	}
}

func TestSpread(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   spread
	}{
		{[]float64{7}, spread{7, 7, 7}},
		{[]float64{5, 1, 4, 2, 3}, spread{3, 2, 4}},
		{[]float64{1, 2}, spread{1.5, 1.25, 1.75}},
	} {
		if got := spreadOf(test.values); got != test.want {
			t.Errorf("%v: %v, want %v", test.values, got, test.want)
		}
	}
	if got := quantile(nil, 0.5); !math.IsNaN(got) {
		t.Errorf("of none: %v", got)
	}
}

func TestRatios(t *testing.T) {
	for name, test := range map[string]struct{ values, against, want []float64 }{
		"by round":              {[]float64{2, 6}, []float64{4, 3}, []float64{0.5, 2}},
		"a round without one":   {[]float64{2, 0, 6}, []float64{4, 1, 3}, []float64{0.5, 2}},
		"a round without other": {[]float64{2, 1}, []float64{0, 1}, []float64{1}},
		"nothing measured":      {[]float64{2, 1}, nil, nil},
	} {
		if got := ratios(test.values, test.against); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// A clock ignores the warm-up, and a disturbed part does not change the rate.
func TestClock(t *testing.T) {
	c := newClock(80*time.Millisecond, 10*time.Millisecond)
	now := c.begin.Add(-time.Millisecond)
	c.add(now, 1000) // too early
	if _, err := c.rate(); err == nil || c.over(c.end.Add(time.Millisecond)) {
		t.Error("a clock without a part has a rate, or is over")
	}
	now = c.begin
	c.add(now, 1000) // begins
	for i := range 8 {
		for j := range 10 {
			now = now.Add(time.Millisecond)
			if i == 3 && j == 9 {
				now = now.Add(time.Second) // the part is as long
			}
			c.add(now, 2)
		}
	}
	if rate, err := c.rate(); err != nil || math.Abs(rate-2000) > 1 || math.Abs(c.rates[0]-2000) > 1 || !c.over(now) {
		t.Errorf("rate %v, the first part's %v, error %v, over %v", rate, c.rates[0], err, c.over(now))
	}
}

// By an uplink of raised sizes, the reference is what plain routing makes at best.
func TestBigUplinkReference(t *testing.T) {
	r := new(result)
	for _, at := range []struct {
		variant, uplink string
		rates           []float64
	}{{plainName, "", []float64{10, 10}}, {plainName, bigUplink, []float64{1, 20}}, {establishedName, bigUplink, []float64{20, 20}}} {
		r.Traffic = append(r.Traffic, trafficResult{
			Setup: setupName(at.variant, at.uplink, smallest), Path: "pod-outside", Family: "IPv6", Workload: streamName, Rates: at.rates,
		})
	}
	if got := r.ratios(row{"pod-outside", streamName, bigUplink}, establishedName, plainName, "IPv6"); !slices.Equal(got, []float64{2, 1}) {
		t.Errorf("got %v, want [2 1]", got)
	}
}

// example is a result in which the rates of ebpfnet are value times those of a bare veth and of plain
// routing.
func example(value float64) *result {
	r := &result{
		Command: "make bench", Kernel: "6.0", CPU: "<CPU>", Rounds: 2,
		Setups: []setupResult{
			{Name: bareName, Variant: bareName, Title: "bare veth", scale: smallest},
			{Name: plainName, Variant: plainName, Title: "plain", scale: smallest},
			{Name: bridgeName, Variant: bridgeName, Title: "bridge & portmap", scale: smallest},
			{Name: redirectName, Variant: redirectName, Title: "redirect", scale: smallest},
			{Name: "ebpfnet", Variant: "ebpfnet", Title: "ebpfnet", scale: smallest, Ours: true, Objects: &objects{Maps: []object{{Name: "flow_table", Bytes: 4096}}}},
			{Name: setupName("ebpfnet", "", crowded), Variant: "ebpfnet", Title: "ebpfnet", scale: crowded, Ours: true},
			{Name: "ebpfnet-always", Variant: "ebpfnet-always", Title: "always", scale: smallest, Ours: true, Absent: "no such key"},
		},
		Calls: []callResult{
			{Setup: bareName, Verb: "DEL", Sequential: []float64{10, 10}, Concurrent: []float64{1, 1}},
			{Setup: bridgeName, Verb: "ADD", Sequential: []float64{100, 200}, Concurrent: []float64{5, 5}},
			{Setup: "ebpfnet", Verb: "ADD", Sequential: []float64{5, 10}, Concurrent: []float64{50, 50}},
			{Setup: "ebpfnet", Verb: "DEL", Sequential: []float64{14, 14}, Concurrent: []float64{50, 50}},
		},
	}
	for _, s := range r.Setups[:6] {
		for _, p := range paths {
			for _, f := range testenv.Families {
				for _, w := range workloads {
					rates := []float64{1000, 2000}
					switch s.Name {
					case "ebpfnet":
						rates = []float64{1000 * value, 2000 * value}
					case setupName("ebpfnet", "", crowded):
						rates = []float64{990 * value, 1980 * value}
						if f.Name == "IPv6" && w.name == "tcp-crr" && p.name == "pod-outside" {
							rates[1] = 1860 * value
						}
					}
					r.Traffic = append(r.Traffic, trafficResult{
						Setup: s.Name, Path: p.name, Family: f.Name, Workload: w.name, Unit: w.unit, Rates: rates, P50: []float64{1, 1}, P99: []float64{2, 2}, P999: []float64{3, 3}})
				}
			}
		}
	}
	return r
}

func TestTargets(t *testing.T) {
	r := example(0.96)
	r.evaluate()
	met := make(map[string]bool)
	for _, v := range r.Targets {
		met[v.Title] = v.Met
		if v.Setup != "ebpfnet" {
			t.Errorf("unexpected verdict on %s", v.Setup)
		}
	}
	for title, want := range map[string]bool{
		"pod ↔ pod, connect-request-close":     true,
		"pod ↔ pod, TCP round trip":            false,
		"pod → outside, connect-request-close": false,
		"pod ↔ pod, TCP stream":                false, // not measured: no bare-big
		"worst of these with 10,000 containers, 20,000 host ports, 500,000 remembered flows": false, // IPv6 has 0.96
		"worst of all rows":              false,
		"ADD, speed-up":                  true,
		"ADDs per second, 16 concurrent": true,
		"DEL, time":                      false,
	} {
		if got, ok := met[title]; got != want || !ok {
			t.Errorf("%s: met is %v (present: %v), want %v", title, got, ok, want)
		}
	}
	if len(r.Targets) != len(targets()) {
		t.Errorf("%d verdicts, want %d", len(r.Targets), len(targets()))
	}
	table := r.targetTable().String()
	for _, want := range []string{
		"0.96 (0.94–0.97) pod → outside, connect-request-close, IPv6: below target", "at most 1.30", "1.40 (1.40–1.40): above target", "20.0 (20.0–20.0): met",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("no %q in\n%s", want, table)
		}
	}
}

// fastPath auto has bounds of its own, which the table shows by column.
func TestTargetsOfAuto(t *testing.T) {
	r := example(0.94)
	var auto []trafficResult
	for _, measured := range r.Traffic {
		if measured.Setup == "ebpfnet" {
			measured.Setup = autoName
			auto = append(auto, measured)
		}
	}
	r.Traffic = append(r.Traffic, auto...)
	r.Setups = append(r.Setups, setupResult{Name: autoName, Variant: autoName, Title: "auto", scale: smallest, Ours: true})
	r.evaluate()
	table := r.targetTable().String()
	const want = "at least 1.00, 0.91 | 0.94 (0.94–0.94) IPv4, 0.94 (0.94–0.94) IPv6: below target | 0.94 (0.94–0.94) IPv4, 0.94 (0.94–0.94) IPv6: met"
	if !strings.Contains(strings.Join(strings.Fields(table), " "), want) {
		t.Errorf("no %q in\n%s", want, table)
	}
}

func TestWriteResults(t *testing.T) {
	file := filepath.Join(t.TempDir(), "RESULTS.md")
	r := example(1)
	r.evaluate()
	for range 2 {
		testenv.Must(t, r.write(options{results: file}))
	}
	text := testenv.ReadFile(t, file)
	for _, part := range []string{r.referenceTable(establishedName).String(), r.targetTable().String(), r.scaleTable().String()} {
		if !strings.Contains(string(text), part) {
			t.Errorf("not in the results:\n%s\n%s", part, text)
		}
	}
}
