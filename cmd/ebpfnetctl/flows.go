package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

func newFlows() *cobra.Command {
	var o containerOptions
	var order string
	cmd := o.addTo(&cobra.Command{
		Use:   "flows [CONTAINER]",
		Short: "connections that the datapath knows, and their states",
		Long: `Lists what the datapath keeps of connections: of all, or of one container.

    snat      opened by a container, and masqueraded
    dnat      opened to a container: by a host port, or by a remote with a route
    egress    opened by a container with an ingress policy: replies are admitted
    claim     the host's own, from a port that masquerading could choose
    rst-held  refused by the host
    offload   bypasses the host's stack: one way, open, closing or closed
    cache     one direction, in the CPUs' forwarding caches: bypass (of the
              stack), stack, or void after a change of the plugin's

States of the first five are netfilter's. What the cache has not used for a
minute is left out. -o wide adds the translated address and the age, which
begins anew after 19 hours. Bytes are not known: a counter would cost each
packet. "ebpfnetctl top" has those of containers.`,
		Example: `  ebpfnetctl flows
  watch -n2 ebpfnetctl flows web --sort idle
  ebpfnetctl flows -o json | jq -r '.[] | select(.kind == "snat") | .translated'`,
	}, func(_ *cobra.Command, p *output.Printer) error {
		list, err := listFlows(&o, order)
		if list == nil && err != nil {
			return err
		}
		return errors.Join(err, flowTable.Print(p, list))
	})
	sortFlag(cmd, &order, "order by `KEY`: age or idle, the longest first", "age", "idle")
	return cmd
}

// flowOrders are the values of --sort. A flow whose time is not known comes last.
var flowOrders = map[string]func(admin.Flow) *float64{
	"age":  func(f admin.Flow) *float64 { return f.Age },
	"idle": func(f admin.Flow) *float64 { return f.Idle },
}

func listFlows(o *containerOptions, order string) ([]admin.Flow, error) {
	attachments, errAttachments := listAttachments(o.dirs)
	if attachments == nil {
		return nil, errAttachments
	}
	var only []*admin.Attachment
	if len(o.words) > 0 {
		var err error
		if only, err = findContainer(attachments, o.words[0]); err != nil {
			return nil, errors.Join(errAttachments, err)
		}
	}
	list, err := admin.Flows(attachments, only)
	if key := flowOrders[order]; key != nil {
		slices.SortStableFunc(list, func(a, b admin.Flow) int { return cmp.Compare(orNever(key(b)), orNever(key(a))) })
	}
	return list, errors.Join(errAttachments, err)
}

func orNever(seconds *float64) float64 {
	if seconds == nil {
		return -1
	}
	return *seconds
}

var flowTable = output.Table[admin.Flow]{
	Columns: []output.Column[admin.Flow]{
		{Head: "KIND", Text: func(f admin.Flow) string { return f.Kind }},
		{Head: "PROTO", Text: func(f admin.Flow) string { return f.Protocol }},
		{Head: "SOURCE", Text: func(f admin.Flow) string { return f.Source }},
		{Head: "DESTINATION", Text: func(f admin.Flow) string { return f.Destination }},
		{Head: "TRANSLATED", Text: func(f admin.Flow) string { return f.Translated }, Wide: true},
		{Head: "CONTAINER", Text: containersOf},
		{Head: "STATE", Text: func(f admin.Flow) string { return f.State }},
		{Head: "AGE", Text: func(f admin.Flow) string { return duration(f.Age) }, Wide: true},
		{Head: "IDLE", Text: func(f admin.Flow) string { return duration(f.Idle) }},
	},
	Name: func(f admin.Flow) string { return f.Kind + "/" + f.Protocol + "/" + f.Source + "/" + f.Destination },
	None: "the datapath knows no connection",
}

func containersOf(f admin.Flow) string {
	return strings.Join(texts(f.Containers, admin.Named.Title), ",")
}

// duration is short: its largest unit and the next one.
func duration(seconds *float64) string {
	if seconds == nil {
		return ""
	}
	s := int(*seconds)
	switch {
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 24*3600:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	default:
		return fmt.Sprintf("%dd%02dh", s/86400, s/3600%24)
	}
}
