package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// metric is a family of samples.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	info bool // its samples are 1
}

const namespace = "ebpfnet_"

func newGauge(name, help string, labels ...string) *metric {
	return &metric{prometheus.NewDesc(namespace+name, help, labels, nil), prometheus.GaugeValue, strings.HasSuffix(name, "_info")}
}

func newCounter(name, help string, labels ...string) *metric {
	return &metric{prometheus.NewDesc(namespace+name, help, labels, nil), prometheus.CounterValue, false}
}

// samples are those of one scrape, by metric and labels.
type samples map[*metric]map[string]*sample

type sample struct {
	labels []string
	value  float64
}

// add adds a sample. Invalid names from outside are made valid, so that a scrape does not fail; names that are
// then equal count as one.
func (s samples) add(m *metric, value float64, labels ...string) {
	for i := range labels {
		labels[i] = show.Text(labels[i])
	}
	key := strings.Join(labels, "\x00") // which no label has
	if s[m] == nil {
		s[m] = map[string]*sample{}
	}
	if s[m][key] == nil {
		s[m][key] = &sample{labels: labels}
	}
	if m.info {
		s[m][key].value = value
	} else {
		s[m][key].value += value
	}
}

// Describe implements [prometheus.Collector]. What there is depends on the host.
func (samples) Describe(chan<- *prometheus.Desc) {}

// Collect implements [prometheus.Collector].
func (s samples) Collect(to chan<- prometheus.Metric) {
	for m, all := range s {
		for _, one := range all {
			to <- prometheus.MustNewConstMetric(m.desc, m.kind, one.value, one.labels...) // their number is right
		}
	}
}
