package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// topOptions are the flags and the argument of top.
type topOptions struct {
	output.Flags
	dataDir  string
	words    []string
	order    string
	samples  int
	interval time.Duration
}

func newTop() *cobra.Command {
	var o topOptions
	cmd := &cobra.Command{
		Use:   "top [CONTAINER]",
		Short: "containers by packets and bytes per second",
		Long: `Shows what containers receive (IN) and send (OUT) per second, by the counters of
their devices, the packets that the datapath has dropped, and their flows. On a
terminal it is a live picture, which q or Ctrl-C ends; elsewhere it measures
once and exits. Before Linux 6.8 no counter has what reaches a container past
the stack, so IN lacks it.

` + containerHelp,
		Example: `  ebpfnetctl top
  ebpfnetctl top --sort drops --interval 5s
  ebpfnetctl top -n 1 -o json | jq -r '.[0].containerID'`,
		Args:              oneWord,
		ValidArgsFunction: completeContainers(&o.dataDir),
		RunE: func(cmd *cobra.Command, words []string) error {
			o.words = words
			return top(cmd, o)
		},
	}
	o.AddToNoun(cmd.Flags())
	addDataDir(cmd, &o.dataDir)
	cmd.Flags().StringVar(&o.order, "sort", "bytes", "order by `KEY`: bytes, packets, drops or flows, the most first")
	cmd.Flags().DurationVar(&o.interval, "interval", 2*time.Second, "measure for `TIME`")
	cmd.Flags().IntVarP(&o.samples, "samples", "n", 0, "measure `N` times, and exit; 0 on a terminal: until q or Ctrl-C")
	completeWith(cmd, "sort", "bytes", "packets", "drops", "flows")
	return cmd
}

// trafficOrders are the values of --sort.
var trafficOrders = map[string]func(operator.Traffic) float64{
	"bytes":   func(t operator.Traffic) float64 { return t.InBytes + t.OutBytes },
	"packets": func(t operator.Traffic) float64 { return t.InPackets + t.OutPackets },
	"drops":   func(t operator.Traffic) float64 { return t.Drops },
	"flows":   func(t operator.Traffic) float64 { return float64(t.Flows) },
}

func (o topOptions) check() error {
	if trafficOrders[o.order] == nil {
		return usageError{fmt.Errorf("top: --sort %s: expected bytes, packets, drops or flows", o.order)}
	}
	if o.samples < 0 {
		return usageError{fmt.Errorf("top: -n %d: expected 0 or more", o.samples)}
	}
	return checkInterval("top", o.interval)
}

// top shows traffic live, or measures a number of times.
func top(cmd *cobra.Command, o topOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	p := output.New(cmd.OutOrStdout(), o.Flags)
	m := &meter{options: o}
	if err := m.measure(); err != nil {
		return err
	}
	if o.samples == 0 && p.IsTerminal() && !p.ForPrograms() && p.Format != output.Name {
		return live(cmd, p, o.interval, m.print)
	}
	return m.printSamples(cmd.Context(), p)
}

// meter keeps the last measurement and the one before.
type meter struct {
	options      topOptions
	last         *operator.Counters
	measurements int
	traffic      []operator.Traffic // since the one before
}

// measure reads the counters. Containers may come and go meanwhile.
func (m *meter) measure() error {
	attachments, err := attachmentsOf(m.options.words, m.options.dataDir)
	if attachments == nil {
		return err
	}
	now, err := operator.ReadCounters(attachments)
	if err != nil {
		return err
	}
	if m.last != nil {
		m.traffic = now.Since(m.last, attachments)
		key := trafficOrders[m.options.order]
		slices.SortStableFunc(m.traffic, func(a, b operator.Traffic) int { return cmp.Compare(key(b), key(a)) })
	}
	m.last = now
	m.measurements++
	return nil
}

// print draws the picture of the time since the last one.
func (m *meter) print(p *output.Printer) error {
	if m.last.Age() >= m.options.interval/2 { // not for the first picture, nor for one of another size
		if err := m.measure(); err != nil {
			return err
		}
	}
	if m.measurements < 2 {
		p.Printf("%s  measuring for %s; q ends\n", p.Paint(output.Bold, "ebpfnet top"), m.options.interval.String())
		return nil
	}
	var in, out float64
	for _, t := range m.traffic {
		in, out = in+t.InBytes, out+t.OutBytes
	}
	p.Printf("%s  %d containers, in %s B/s, out %s B/s, sorted by %s; q ends\n\n",
		p.Paint(output.Bold, "ebpfnet top"), len(m.traffic), short(in), short(out), m.options.order)
	return trafficNoun.Print(p, m.traffic)
}

// printSamples prints a list after each interval.
func (m *meter) printSamples(ctx context.Context, p *output.Printer) error {
	ticker := time.NewTicker(m.options.interval)
	defer ticker.Stop()
	for i := range max(m.options.samples, 1) {
		if !isNext(ctx, ticker) {
			return nil
		}
		if err := m.measure(); err != nil {
			return err
		}
		if i > 0 && !p.ForPrograms() {
			p.Printf("\n")
		}
		if err := m.printSample(p); err != nil {
			return err
		}
	}
	return nil
}

func (m *meter) printSample(p *output.Printer) error {
	if p.ForPrograms() && m.options.samples > 1 {
		return p.Line(m.traffic)
	}
	return trafficNoun.Print(p, m.traffic)
}

var trafficNoun = output.Noun[operator.Traffic]{
	Columns: []output.Column[operator.Traffic]{
		{Head: "CONTAINER", Text: func(t operator.Traffic) string { return cmp.Or(t.ContainerID, t.Owner) }, Elastic: true},
		{Head: "NETWORK", Text: func(t operator.Traffic) string { return t.Network }, Elastic: true},
		{Head: "INTERFACE", Text: func(t operator.Traffic) string { return t.IfName }, Wide: true},
		{Head: "IN B/s", Text: func(t operator.Traffic) string { return short(t.InBytes) }, Right: true},
		{Head: "OUT B/s", Text: func(t operator.Traffic) string { return short(t.OutBytes) }, Right: true},
		{Head: "IN pkt/s", Text: func(t operator.Traffic) string { return short(t.InPackets) }, Right: true},
		{Head: "OUT pkt/s", Text: func(t operator.Traffic) string { return short(t.OutPackets) }, Right: true},
		{Head: "DROPS/s", Text: func(t operator.Traffic) string { return short(t.Drops) }, Right: true, Color: func(t operator.Traffic) output.Color {
			if t.Drops > 0 {
				return output.Yellow
			}
			return output.Plain
		}},
		{Head: "FLOWS", Text: func(t operator.Traffic) string { return strconv.Itoa(t.Flows) }, Right: true},
		{Head: "DEVICE", Text: func(t operator.Traffic) string { return t.Device }, Wide: true},
	},
	Name: func(t operator.Traffic) string {
		return containerName(&operator.Attachment{Attachment: t.Attachment, Owner: t.Owner})
	},
	None: "no container is connected",
}

// short rounds a number to three digits, with a prefix of the SI.
func short(number float64) string {
	for _, prefix := range []string{"", "k", "M", "G", "T"} {
		switch {
		case number >= 999.5:
			number /= 1000
		case prefix == "" || number >= 99.95:
			return fmt.Sprintf("%.0f%s", number, prefix)
		default:
			return fmt.Sprintf("%.1f%s", number, prefix)
		}
	}
	return fmt.Sprintf("%.0fP", number)
}
