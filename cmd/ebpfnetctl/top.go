package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

type topOptions struct {
	containerOptions
	order    string
	interval time.Duration
}

func newTop() *cobra.Command {
	o := topOptions{order: "bytes"}
	cmd := o.addTo(&cobra.Command{
		Use:   "top [CONTAINER]",
		Short: "containers by packets and bytes per second",
		Long: `Measures for an interval what containers receive (IN) and send (OUT) per second,
by the counters of their devices, and the packets that the datapath drops, and
lists them, with the number of their flows. Before Linux 6.8 no counter has what
reaches a container past the stack, so IN lacks it.`,
		Example: `  ebpfnetctl top
  watch -n2 ebpfnetctl top --sort drops
  ebpfnetctl top -o json | jq -r '.[0].containerID'`,
	}, func(cmd *cobra.Command, p *output.Printer) error { return top(cmd.Context(), p, &o) })
	sortFlag(cmd, &o.order, "order by `KEY`: bytes, packets, drops or flows, the largest first", "bytes", "packets", "drops", "flows")
	cmd.Flags().DurationVar(&o.interval, "interval", time.Second, "measure for `TIME`")
	return cmd
}

// trafficOrders are the values of --sort.
var trafficOrders = map[string]func(admin.Traffic) float64{
	"bytes":   func(t admin.Traffic) float64 { return t.InBytes + t.OutBytes },
	"packets": func(t admin.Traffic) float64 { return t.InPackets + t.OutPackets },
	"drops":   func(t admin.Traffic) float64 { return t.Drops },
	"flows":   func(t admin.Traffic) float64 { return float64(t.Flows) },
}

func top(ctx context.Context, p *output.Printer, o *topOptions) error {
	const shortest, longest = 100 * time.Millisecond, time.Hour

	if o.interval < shortest || o.interval > longest {
		return usageError{fmt.Errorf("top: --interval %s: expected %s to %s", o.interval, shortest, longest)}
	}
	_, attachments, errAttachments := o.attachments()
	if attachments == nil {
		return errAttachments
	}
	list, err := admin.MeasureTraffic(ctx, attachments, o.interval)
	if err != nil {
		return errors.Join(errAttachments, err)
	}
	key := trafficOrders[o.order]
	slices.SortStableFunc(list, func(a, b admin.Traffic) int { return cmp.Compare(key(b), key(a)) })
	return errors.Join(errAttachments, trafficTable.Print(p, list))
}

var trafficTable = output.Table[admin.Traffic]{
	Columns: []output.Column[admin.Traffic]{
		{Head: "CONTAINER", Text: func(t admin.Traffic) string { return t.Title() }},
		{Head: "NETWORK", Text: func(t admin.Traffic) string { return t.Network }},
		{Head: "INTERFACE", Text: func(t admin.Traffic) string { return t.IfName }, Wide: true},
		{Head: "IN B/s", Text: func(t admin.Traffic) string { return short(t.InBytes) }},
		{Head: "OUT B/s", Text: func(t admin.Traffic) string { return short(t.OutBytes) }},
		{Head: "IN pkt/s", Text: func(t admin.Traffic) string { return short(t.InPackets) }},
		{Head: "OUT pkt/s", Text: func(t admin.Traffic) string { return short(t.OutPackets) }},
		{Head: "DROPS/s", Text: func(t admin.Traffic) string { return short(t.Drops) }},
		{Head: "FLOWS", Text: func(t admin.Traffic) string { return strconv.Itoa(t.Flows) }},
		{Head: "DEVICE", Text: func(t admin.Traffic) string { return t.Device }, Wide: true},
	},
	Name: func(t admin.Traffic) string {
		return containerName(t.Named)
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
