// Package metrics exports the figures of a host to Prometheus: as text, as a file for node_exporter, or by HTTP.
// A dashboard and alert rules for them are beside the code.
package metrics

import (
	"cmp"
	"errors"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
	"github.com/ebpfnet/ebpfnet/plugin/show"
	"github.com/ebpfnet/ebpfnet/plugin/version"
)

// Options say what to export.
type Options struct {
	admin.TotalsOptions
	Runtimes runtimes.Options // whose network configurations have the sizes of address ranges
}

// The metrics. Published names do not change, because dashboards and alerts use them.
var (
	buildInfo = newGauge("build_info", "The program that has these metrics, and its BPF programs.", "version", "revision", "build", "abi")
	loaded    = newGauge("datapath_loaded", "Whether the datapath is loaded (1) or not (0), as before the first ADD.")
	datapath  = newGauge("datapath_info", "Programs that are loaded.", "revision", "build", "abi", "attach")
	uplink    = newGauge("uplink_info", "External interfaces that have programs.", "device")
	warnings  = newGauge("host_warnings", "What of the host hinders the datapath: ebpfnetctl status lists it.")

	mapEntries    = newGauge("map_entries", "Entries of a map, except those that traffic fills.", "map")
	mapMaxEntries = newGauge("map_max_entries", "Maximum number of entries of a map; of a per-CPU map, on each CPU.", "map")
	mapBytes      = newGauge("map_memory_bytes", "Memory of a map, as the kernel accounts it.", "map")

	dropPackets = newCounter("drops_total", "Packets dropped since the datapath was loaded; what a reason means: ebpfnetctl status -o json.", "reason")
	dropBytes   = newCounter("drop_bytes_total", "Bytes of packets dropped since the datapath was loaded.", "reason")

	attachments     = newGauge("attachments", "Containers' interfaces that are connected.", "network")
	deadAttachments = newGauge("dead_attachments", "Containers' interfaces that are gone, and that DEL or GC has to clean up after.", "network")

	addresses         = newGauge("addresses", "Addresses for containers, in ranges of at most 2^32.", "network", "range")
	addressesReserved = newGauge("addresses_reserved", "Addresses that are reserved.", "network", "range")

	flowTableUse = newGauge("flow_table_used_ratio", "Estimated share of the places for connections whose connections are established, and so not replaced.")
	flows        = newGauge("flows", "Connections in the datapath, without those that have expired.", "state")

	containerInfo     = newGauge("container_info", "Interface of a container.", append([]string{"device"}, ofContainer...)...)
	containerRxBytes  = newCounter("container_receive_bytes_total", "Bytes received by a container.", ofContainer...)
	containerRx       = newCounter("container_receive_packets_total", "Packets received by a container.", ofContainer...)
	containerTxBytes  = newCounter("container_transmit_bytes_total", "Bytes sent by a container.", ofContainer...)
	containerTx       = newCounter("container_transmit_packets_total", "Packets sent by a container.", ofContainer...)
	containerDrops    = newCounter("container_drops_total", "Packets from and to a container that were dropped.", append([]string{"reason"}, ofContainer...)...)
	containerDropSize = newCounter("container_drop_bytes_total", "Bytes of those packets.", append([]string{"reason"}, ofContainer...)...)

	ofContainer = []string{"network", "container_id", "interface"}
)

type source struct {
	totals func() (*admin.Totals, error)
	pools  func() ([]pool, error)
}

// New returns a gatherer that reads the metrics of the calling process's network namespace for each scrape.
func New(o Options) prometheus.Gatherer {
	return prometheus.GathererFunc(source{
		totals: func() (*admin.Totals, error) { return admin.ReadTotals(o.TotalsOptions) },
		pools:  func() ([]pool, error) { return poolsOf(o.Runtimes) },
	}.gather)
}

// gather returns all metrics, or an error: a part of them would look complete.
func (from source) gather() ([]*dto.MetricFamily, error) {
	s, err := from.collect()
	if err != nil {
		return nil, errors.New(show.Message(err.Error())) // HTTP clients see it, too
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(s)
	return registry.Gather()
}

func (from source) collect() (samples, error) {
	pools, err := from.pools()
	if err != nil {
		return nil, err
	}
	s := samples{}
	s.add(buildInfo, 1, version.String(), decimal(bpf.Revision), loader.BuildID(bpf.Build).String(), decimal(loader.ABI))
	for _, p := range pools {
		s.addPool(p)
	}
	totals, err := from.totals()
	if errors.Is(err, loader.ErrNotLoaded) {
		s.add(loaded, 0)
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	s.addHost(totals)
	s.addMaps(totals)
	s.addContainers(totals)
	return s, nil
}

func (s samples) addPool(p pool) {
	const largest = 1 << 32 // no host uses up more: how many there are says nothing

	for _, u := range p.ranges {
		if u.Addresses <= largest {
			s.add(addresses, u.Addresses, p.network, u.Ranges.String())
		}
		s.add(addressesReserved, float64(u.Reserved), p.network, u.Ranges.String())
	}
}

func (s samples) addHost(t *admin.Totals) {
	attach := map[bpf.Attach]string{bpf.AttachTCX: "tcx", bpf.AttachClsact: "clsact"}[bpf.Attach(t.Config.Attach)]
	s.add(loaded, 1)
	s.add(datapath, 1, decimal(t.Config.Revision), loader.BuildID(t.Config.Build).String(), decimal(t.Config.Abi), attach)
	for _, device := range t.Uplinks {
		s.add(uplink, 1, device)
	}
	s.add(warnings, float64(len(t.Warnings)))
	s.addDrops(dropPackets, dropBytes, t.Drops)
}

// addDrops adds the reasons that have occurred.
func (s samples) addDrops(packets, bytes *metric, drops []maps.DropCount, labels ...string) {
	for _, d := range drops {
		if d.Packets > 0 {
			s.add(packets, float64(d.Packets), append([]string{d.Reason.Name()}, labels...)...)
			s.add(bytes, float64(d.Bytes), append([]string{d.Reason.Name()}, labels...)...)
		}
	}
}

func (s samples) addMaps(t *admin.Totals) {
	for _, m := range t.Maps {
		if m.Entries != nil {
			s.add(mapEntries, float64(*m.Entries), m.Name)
		}
		s.add(mapMaxEntries, float64(m.MaxEntries), m.Name)
		s.add(mapBytes, float64(m.Bytes), m.Name)
	}
	s.add(flowTableUse, t.FlowTableUse)
	for state, n := range t.Flows {
		s.add(flows, float64(n), state)
	}
}

func (s samples) addContainers(t *admin.Totals) {
	for network, n := range t.Networks {
		s.add(attachments, float64(n.Connected), network)
		s.add(deadAttachments, float64(n.Dead), network)
	}
	for _, c := range t.Containers {
		labels := []string{c.Network, cmp.Or(c.ContainerID, c.Owner), c.IfName}
		s.add(containerInfo, 1, append([]string{c.Device}, labels...)...)
		s.add(containerRxBytes, float64(c.InBytes), labels...)
		s.add(containerRx, float64(c.InPackets), labels...)
		s.add(containerTxBytes, float64(c.OutBytes), labels...)
		s.add(containerTx, float64(c.OutPackets), labels...)
		s.addDrops(containerDrops, containerDropSize, c.Drops, labels...)
	}
}

func decimal(n uint32) string { return strconv.FormatUint(uint64(n), 10) }

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
