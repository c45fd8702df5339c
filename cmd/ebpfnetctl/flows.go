package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// flowOptions are the flags and the argument of flows.
type flowOptions struct {
	output.Flags
	dataDir  string
	words    []string
	order    string
	watch    bool
	interval time.Duration
}

func newFlows() *cobra.Command {
	var o flowOptions
	cmd := &cobra.Command{
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
packet. "ebpfnetctl top" has those of containers.

` + containerHelp,
		Example: `  ebpfnetctl flows
  ebpfnetctl flows web --sort idle --watch
  ebpfnetctl flows -o json | jq -r '.[] | select(.kind == "snat") | .translated'`,
		Args:              oneWord,
		ValidArgsFunction: completeContainers(&o.dataDir),
		RunE: func(cmd *cobra.Command, words []string) error {
			o.words = words
			return flows(cmd, o)
		},
	}
	o.AddToNoun(cmd.Flags())
	addDataDir(cmd, &o.dataDir)
	cmd.Flags().StringVar(&o.order, "sort", "", "order by `KEY`: age or idle, the longest first")
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "list again and again, until q or Ctrl-C")
	cmd.Flags().DurationVar(&o.interval, "interval", 2*time.Second, "with --watch: `TIME` from one list to the next")
	completeWith(cmd, "sort", "age", "idle")
	return cmd
}

// flowOrders are the values of --sort. A flow whose time is not known comes last.
var flowOrders = map[string]func(operator.Flow) *float64{
	"age":  func(f operator.Flow) *float64 { return f.Age },
	"idle": func(f operator.Flow) *float64 { return f.Idle },
}

func (o flowOptions) check() error {
	if o.order == "bytes" {
		return usageError{errors.New("flows: --sort bytes: the datapath counts no bytes of flows, because that would cost each packet; " +
			"expected age or idle (`ebpfnetctl top` has the bytes of containers)")}
	}
	if _, known := flowOrders[o.order]; !known && o.order != "" {
		return usageError{fmt.Errorf("flows: --sort %s: expected age or idle", o.order)}
	}
	return checkInterval("flows", o.interval)
}

// flows lists once, or again and again.
func flows(cmd *cobra.Command, o flowOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	p := output.New(cmd.OutOrStdout(), o.Flags)
	if !o.watch {
		list, err := listFlows(o)
		if list == nil && err != nil {
			return err
		}
		return errors.Join(err, flowNoun.Print(p, list))
	}
	return live(cmd, p, o.interval, func(p *output.Printer) error {
		list, err := listFlows(o)
		if err != nil {
			return err
		}
		if p.ForPrograms() {
			return p.Line(list)
		}
		p.Printf("%s  %d entries; q ends\n\n", p.Paint(output.Bold, "ebpfnet flows"), len(list))
		return flowNoun.Print(p, list)
	})
}

func listFlows(o flowOptions) ([]operator.Flow, error) {
	attachments, errAttachments := operator.Attachments(o.dataDir)
	if attachments == nil {
		return nil, errAttachments
	}
	var only []*operator.Attachment
	if len(o.words) > 0 {
		var err error
		if only, err = findContainer(attachments, o.words[0]); err != nil {
			return nil, errors.Join(errAttachments, err)
		}
	}
	list, err := operator.Flows(attachments, only)
	if key := flowOrders[o.order]; key != nil {
		slices.SortStableFunc(list, func(a, b operator.Flow) int { return cmp.Compare(orNever(key(b)), orNever(key(a))) })
	}
	return list, errors.Join(errAttachments, err)
}

func orNever(seconds *float64) float64 {
	if seconds == nil {
		return -1
	}
	return *seconds
}

var flowNoun = output.Noun[operator.Flow]{
	Columns: []output.Column[operator.Flow]{
		{Head: "KIND", Text: func(f operator.Flow) string { return f.Kind }},
		{Head: "PROTO", Text: func(f operator.Flow) string { return f.Protocol }},
		{Head: "SOURCE", Text: func(f operator.Flow) string { return f.Source }, Ends: true},
		{Head: "DESTINATION", Text: func(f operator.Flow) string { return f.Destination }, Ends: true},
		{Head: "TRANSLATED", Text: func(f operator.Flow) string { return f.Translated }, Wide: true},
		{Head: "CONTAINER", Text: containersOf, Elastic: true},
		{Head: "STATE", Text: func(f operator.Flow) string { return f.State }},
		{Head: "AGE", Text: func(f operator.Flow) string { return duration(f.Age) }, Wide: true, Right: true},
		{Head: "IDLE", Text: func(f operator.Flow) string { return duration(f.Idle) }, Right: true},
	},
	Name: func(f operator.Flow) string { return f.Kind + "/" + f.Protocol + "/" + f.Source + "/" + f.Destination },
	None: "the datapath knows no connection",
}

func containersOf(f operator.Flow) string {
	var ids []string
	for _, a := range f.Containers {
		ids = append(ids, a.ContainerID)
	}
	return strings.Join(ids, ",")
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
