package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
)

type dropOptions struct {
	containerOptions
	reason string
	follow bool
	bytes  int
	limit  uint32
}

func newDrops() *cobra.Command {
	var o dropOptions
	cmd := o.addTo(&cobra.Command{
		Use:   "drops [CONTAINER]",
		Short: "dropped packets and why: counters, or each as it happens",
		Long: `Lists what the datapath has dropped, by container and reason. With --follow it
prints each packet as it is dropped, until Ctrl-C: packets that the datapath
drops, and containers' packets that the host's stack drops (NETFILTER_DROP,
IP_RPFILTER, ...).

It costs packets nothing while nobody follows. One command can follow at a time.
In a flood it prints --limit packets per second, CPU and reason, and how many it
left out. Drops of the stack need tracefs and the kernel's types (BTF). Linux
before 5.17 reports the function that drops a packet, but no reason.`,
		Example: `  ebpfnetctl drops
  ebpfnetctl drops --follow web --bytes 64
  ebpfnetctl drops --follow --reason policy-egress -o json | jq -r .peer`,
	}, func(cmd *cobra.Command, p *output.Printer) error {
		if err := o.check(cmd); err != nil {
			return err
		}
		if o.follow {
			return followDrops(cmd, p, o)
		}
		return countDrops(p, o)
	})
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "print each packet as it is dropped, until Ctrl-C")
	cmd.Flags().StringVar(&o.reason, "reason", "", "only those with `REASON`, such as policy-egress or NETFILTER_DROP")
	cmd.Flags().IntVar(&o.bytes, "bytes", 0, "with --follow: also the first `N` bytes of each packet")
	cmd.Flags().Uint32Var(&o.limit, "limit", 250, "with --follow: print at most `N` per second, CPU and reason")
	completeWith(cmd, "reason", maps.ReasonNames()...)
	return cmd
}

func (o dropOptions) check(cmd *cobra.Command) error {
	for _, name := range []string{"bytes", "limit"} {
		if !o.follow && cmd.Flags().Changed(name) {
			return usageError{fmt.Errorf("drops: --%s: expected --follow with it", name)}
		}
	}
	if o.bytes < 0 || o.bytes > drops.MaxBytes {
		return usageError{fmt.Errorf("drops: --bytes %d: expected 0 to %d", o.bytes, drops.MaxBytes)}
	}
	if o.limit == 0 {
		return usageError{errors.New("drops: --limit 0: expected at least 1")}
	}
	isOfStack := o.follow && !strings.ContainsFunc(o.reason, func(r rune) bool { return (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' })
	if _, ours := maps.ParseReason(o.reason); o.reason != "" && !ours && !isOfStack {
		return usageError{fmt.Errorf("drops: --reason %s: expected one of %s; or with --follow one of the kernel's in capitals",
			o.reason, strings.Join(maps.ReasonNames(), ", "))}
	}
	return nil
}

func countDrops(p *output.Printer, o dropOptions) error {
	_, attachments, errAttachments := o.attachments()
	if attachments == nil {
		return errAttachments
	}
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()
	list, err := drops.Counters(datapath, attachments, len(o.words) == 0)
	if err != nil {
		return err
	}
	if o.reason != "" {
		list = slices.DeleteFunc(list, func(c drops.Counter) bool { return c.Reason != o.reason })
	}
	return errors.Join(errAttachments, dropTable.Print(p, list))
}

var dropTable = output.Table[drops.Counter]{
	Columns: []output.Column[drops.Counter]{
		{Head: "CONTAINER", Text: func(c drops.Counter) string { return c.Title() }},
		{Head: "NETWORK", Text: func(c drops.Counter) string { return c.Network }, Wide: true},
		{Head: "INTERFACE", Text: func(c drops.Counter) string { return c.IfName }, Wide: true},
		{Head: "PACKETS", Text: func(c drops.Counter) string { return strconv.FormatUint(c.Packets, 10) }},
		{Head: "BYTES", Text: func(c drops.Counter) string { return strconv.FormatUint(c.Bytes, 10) }, Wide: true},
		{Head: "REASON", Text: func(c drops.Counter) string { return c.Reason }},
		{Head: "MEANING", Text: func(c drops.Counter) string {
			if len(c.Policies) == 0 {
				return c.Meaning
			}
			return c.Meaning + ": isolated by " + strings.Join(c.Policies, ", ")
		}},
		{Head: "DEVICE", Text: func(c drops.Counter) string { return c.Device }, Wide: true},
	},
	Name: func(c drops.Counter) string {
		if c.Owner == "" {
			return c.Reason
		}
		return containerName(c.Named) + "/" + c.Reason
	},
	None: "no packet was dropped",
}
