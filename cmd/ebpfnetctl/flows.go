package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

func newFlows() *cobra.Command {
	var o flowOptions
	cmd := o.addTo(&cobra.Command{
		Use:   "flows [CONTAINER]",
		Short: "connections that the datapath knows, and their states",
		Long: `Lists the connections that the datapath knows, one a line, like conntrack -L: of
all containers and the host, or of one container.

SOURCE and DESTINATION are those of its first packet, before TRANSLATED by
masquerading, a host port, or "by the host": rules of the host, such as
kube-proxy's for a service, which the datapath repeats. If no entry says who has
opened a connection, the side with the lower port is the destination. STATE is
netfilter's, or RST_HELD if the host has refused it, and empty if it is not
known. PATH:

    offload  established, and bypasses the host's stack
    bypass   the last packets have bypassed the stack
    stack    the last packets have passed the stack

A connection without CONTAINER is the host's own, from a port that masquerading
could choose. -o wide adds POLICY and the age, which begins anew after 19 hours:
"admitted" is a connection that has an entry for the rules of a container.
Bytes are not known, because a counter would cost each packet: "ebpfnetctl top"
has those of containers.`,
		Example: `  ebpfnetctl flows
  ebpfnetctl flows web --port 8080
  ebpfnetctl flows --peer 192.0.2.0/24 --state ESTABLISHED
  watch -n2 ebpfnetctl flows web --sort idle
  ebpfnetctl flows -o json | jq -r '.[] | select(.path == "offload") | .source'`,
	}, func(_ *cobra.Command, p *output.Printer) error {
		list, err := o.list()
		if list == nil && err != nil {
			return err
		}
		return errors.Join(err, flowTable.Print(p, list))
	})
	flags := cmd.Flags()
	flags.Func("port", "only those with port `N` at a side, also a translated one", o.setPort)
	flags.Func("peer", "only those whose remote side is in `ADDRESS[/BITS]`", o.setPeer)
	flags.Var(&output.Choice{Value: &o.filter.State, Known: admin.FlowStates()}, "state", "only those in `STATE`")
	sortFlag(cmd, &o.order, "order by `KEY`: age or idle, the longest first", "age", "idle")
	return cmd
}

type flowOptions struct {
	containerOptions
	filter admin.FlowFilter
	order  string
}

func (o *flowOptions) setPort(text string) error {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return errors.New("expected a number from 1 to 65535")
	}
	o.filter.Port = uint16(port)
	return nil
}

func (o *flowOptions) setPeer(text string) error {
	peer, err := netip.ParsePrefix(text)
	if addr, errAddr := netip.ParseAddr(text); errAddr == nil && addr.Zone() == "" {
		peer, err = addr.Prefix(addr.BitLen())
	}
	if err != nil {
		return errors.New("expected an address or a prefix, such as 192.0.2.7 or 2001:db8::/32")
	}
	o.filter.Peer = peer
	return nil
}

// flowOrders are the values of --sort. A flow whose time is not known comes last.
var flowOrders = map[string]func(admin.Flow) *float64{
	"age":  func(f admin.Flow) *float64 { return f.Age },
	"idle": func(f admin.Flow) *float64 { return f.Idle },
}

func (o *flowOptions) list() ([]admin.Flow, error) {
	all, chosen, errAttachments := o.attachments()
	if chosen == nil {
		return nil, errAttachments
	}
	if len(o.words) > 0 { // else also connections of the host
		o.filter.Containers = chosen
	}
	list, err := admin.Flows(all, o.filter)
	if key := flowOrders[o.order]; key != nil {
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
		{Head: "PROTO", Text: func(f admin.Flow) string { return f.Protocol }},
		{Head: "SOURCE", Text: func(f admin.Flow) string { return f.Source.String() }},
		{Head: "DESTINATION", Text: func(f admin.Flow) string { return f.Destination.String() }},
		{Head: "TRANSLATED", Text: translationOf},
		{Head: "CONTAINER", Text: containersOf},
		{Head: "STATE", Text: func(f admin.Flow) string { return f.State }},
		{Head: "PATH", Text: func(f admin.Flow) string { return f.Path }},
		{Head: "POLICY", Text: policyOf, Wide: true},
		{Head: "AGE", Text: func(f admin.Flow) string { return duration(f.Age) }, Wide: true},
		{Head: "IDLE", Text: func(f admin.Flow) string { return duration(f.Idle) }},
	},
	Name: func(f admin.Flow) string { return fmt.Sprintf("%s/%s/%s", f.Protocol, f.Source, f.Destination) },
	None: "no connection found",
}

func translationOf(f admin.Flow) string {
	var words []string
	if f.TranslatedSource.IsValid() {
		words = append(words, "from", f.TranslatedSource.String())
	}
	if f.TranslatedDestination.IsValid() {
		words = append(words, "to", f.TranslatedDestination.String())
	}
	if f.TranslatedByHost {
		words = append(words, "by the host")
	}
	return strings.Join(words, " ")
}

func policyOf(f admin.Flow) string {
	if f.Admitted {
		return "admitted"
	}
	return ""
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
