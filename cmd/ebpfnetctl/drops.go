package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/drops"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/wanted"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// dropOptions are the flags and the argument of drops.
type dropOptions struct {
	output.Flags
	dataDir, cacheDir string
	words             []string
	reason            string
	follow            bool
	bytes             int
	limit             uint32
}

func newDrops() *cobra.Command {
	var o dropOptions
	cmd := &cobra.Command{
		Use:   "drops [CONTAINER]",
		Short: "dropped packets and why: counters, or each as it happens",
		Long: `Lists what the datapath has dropped, by container and reason. With --follow it
tells each packet as it is dropped, until Ctrl-C: by the datapath, or by the
host's stack (NETFILTER_DROP, IP_RPFILTER, ...) if it is a container's.

It costs packets nothing while nobody follows. One command can follow at a time.
Of a flood, --limit packets per second, CPU and reason are told, and the number
of those left out. Drops of the stack need tracefs and the kernel's types (BTF).
Linux before 5.17 tells no reasons for them, but in which function.
` + containerHelp,
		Example: `  ebpfnetctl drops
  ebpfnetctl drops --follow web --bytes 64
  ebpfnetctl drops --follow --reason policy -o json | jq -r .peer`,
		Args:              oneWord,
		ValidArgsFunction: completeContainers(&o.dataDir),
		RunE: func(cmd *cobra.Command, words []string) error {
			o.words = words
			if err := o.check(cmd); err != nil {
				return err
			}
			if o.follow {
				return followDrops(cmd, o)
			}
			return countDrops(output.New(cmd.OutOrStdout(), o.Flags), o)
		},
	}
	o.AddToNoun(cmd.Flags())
	addDataDir(cmd, &o.dataDir)
	cmd.Flags().StringVar(&o.cacheDir, "cache-dir", wanted.DefaultCacheDir, "`DIR` is libcni's cache, which knows the pods")
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "tell each packet as it is dropped, until Ctrl-C")
	cmd.Flags().StringVar(&o.reason, "reason", "", "those with `REASON` alone, such as policy or NETFILTER_DROP")
	cmd.Flags().IntVar(&o.bytes, "bytes", 0, "with --follow: also the first `N` bytes of each packet")
	cmd.Flags().Uint32Var(&o.limit, "limit", 250, "with --follow: tell at most `N` per second, CPU and reason")
	completeWith(cmd, "reason", maps.ReasonNames()...)
	return cmd
}

func (o dropOptions) check(cmd *cobra.Command) error {
	for _, name := range []string{"bytes", "limit"} {
		if !o.follow && cmd.Flags().Changed(name) {
			return usageError{fmt.Errorf("drops: --%s: expected --follow with it", name)}
		}
	}
	if o.bytes < 0 || o.bytes > drops.MostBytes {
		return usageError{fmt.Errorf("drops: --bytes %d: expected 0 to %d", o.bytes, drops.MostBytes)}
	}
	const mostPerSecond = 100_000
	if o.limit < 1 || o.limit > mostPerSecond {
		return usageError{fmt.Errorf("drops: --limit %d: expected 1 to %d", o.limit, mostPerSecond)}
	}
	if _, ours := maps.ParseReason(o.reason); o.reason != "" && !ours && (!o.follow || !isStackReason(o.reason)) {
		return usageError{fmt.Errorf("drops: --reason %s: expected one of %s; or with --follow one of the kernel's in capitals",
			o.reason, strings.Join(maps.ReasonNames(), ", "))}
	}
	return nil
}

// isStackReason returns whether a reason has the form of the kernel's.
func isStackReason(reason string) bool {
	return !strings.ContainsFunc(reason, func(r rune) bool { return (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '_' })
}

// countDrops prints the counters.
func countDrops(p *output.Printer, o dropOptions) error {
	attachments, errAttachments := attachmentsOf(o.words, o.dataDir)
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
	return errors.Join(errAttachments, dropNoun.Print(p, list))
}

var dropNoun = output.Noun[drops.Counter]{
	Columns: []output.Column[drops.Counter]{
		{Head: "CONTAINER", Text: func(c drops.Counter) string { return cmp.Or(c.ContainerID, c.Owner) }, Elastic: true},
		{Head: "NETWORK", Text: func(c drops.Counter) string { return c.Network }, Wide: true},
		{Head: "INTERFACE", Text: func(c drops.Counter) string { return c.IfName }, Wide: true},
		{Head: "PACKETS", Text: func(c drops.Counter) string { return strconv.FormatUint(c.Packets, 10) }, Right: true},
		{Head: "BYTES", Text: func(c drops.Counter) string { return strconv.FormatUint(c.Bytes, 10) }, Wide: true, Right: true},
		{Head: "REASON", Text: func(c drops.Counter) string { return c.Reason }},
		{Head: "MEANING", Text: func(c drops.Counter) string { return c.Meaning }, Wraps: true},
		{Head: "DEVICE", Text: func(c drops.Counter) string { return c.Device }, Wide: true},
	},
	Name: func(c drops.Counter) string {
		if c.Owner == "" {
			return c.Reason
		}
		return containerName(&operator.Attachment{Attachment: c.Attachment, Owner: c.Owner}) + "/" + c.Reason
	},
	None: "no packet was dropped",
}
