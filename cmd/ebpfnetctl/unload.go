package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

func newUnload() *cobra.Command {
	var yes bool
	var dataDir string
	cmd := &cobra.Command{
		Use:   "unload",
		Short: "remove ebpfnet from the kernel",
		Long: `Removes ebpfnet from the kernel. Without --yes it only prints what that would
break, and exits with 1.`,
		Example: "  ebpfnetctl unload\n  ebpfnetctl unload --yes",
		Args:    noWords,
		RunE:    func(cmd *cobra.Command, _ []string) error { return unload(cmd, yes, dataDir) },
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do it")
	addDataDir(cmd, &dataDir)
	return cmd
}

// unload prints what it would break, or unloads.
func unload(cmd *cobra.Command, yes bool, dataDir string) error {
	ctx, done := withLocks(cmd)
	defer done()
	op, err := operator.Open(loader.OpenForRelease, dataDir)
	if err != nil {
		return err
	}
	defer op.Close()

	if yes {
		if err := op.Unload(ctx); err != nil {
			return err
		}
		output.Printf(cmd.OutOrStdout(), "unloaded; the next ADD loads it again\n")
		return nil
	}
	usage, err := op.Usage()
	if err != nil {
		return err
	}
	return fmt.Errorf("nothing was done: unloading would remove %d host port entries and %d flows, detach the programs from "+
		"uplinks %s, and end masquerading and host ports for %d containers; use --yes to unload (the containers: %s)",
		usage.HostPorts, usage.Flows, strings.Join(usage.Uplinks, ", "), len(usage.Containers), strings.Join(usage.Containers, ", "))
}
