package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

func newUnload() *cobra.Command {
	var yes, ifUnused bool
	var dataDir string
	cmd := &cobra.Command{
		Use:   "unload",
		Short: "remove ebpfnet from the kernel",
		Long: `Removes ebpfnet from the kernel. Without a flag it only prints what that would
break, and exits with 1. So does --if-unused while a container is connected.`,
		Example: "  ebpfnetctl unload\n  ebpfnetctl unload --yes\n  ebpfnetctl unload --if-unused",
		Args:    noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case yes && ifUnused:
				return usageError{errors.New("unload: --yes and --if-unused exclude each other")}
			case ifUnused:
				return unloadUnused(cmd, dataDir)
			}
			return unload(cmd, yes, dataDir)
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do it")
	cmd.Flags().BoolVar(&ifUnused, "if-unused", false, "do it if no container is connected; no error if nothing is loaded")
	addDataDir(cmd, &dataDir)
	return cmd
}

// unloadUnused is for those who remove the plugin, without which a runtime cannot DEL its containers.
func unloadUnused(cmd *cobra.Command, dataDir string) error {
	containers, err := admin.Connected(dataDir)
	if err != nil {
		return err
	}
	if len(containers) > 0 {
		return fmt.Errorf("nothing was done: stop the containers first (%d): %s", len(containers), strings.Join(containers, ", "))
	}
	err = unload(cmd, true, dataDir)
	if errors.Is(err, loader.ErrNotLoaded) {
		output.Printf(cmd.OutOrStdout(), "nothing is loaded\n")
		return nil
	}
	return err
}

// unload prints what it would break, or unloads.
func unload(cmd *cobra.Command, yes bool, dataDir string) error {
	ctx, done := withLocks(cmd)
	defer done()
	op, err := admin.Open(loader.OpenForRelease, dataDir)
	if err != nil {
		return err
	}
	defer op.Close()

	if yes {
		warning, err := op.Unload(ctx)
		if warning != nil {
			output.Printf(cmd.OutOrStdout(), "warning: %v\n", warning)
		}
		if err != nil {
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
		usage.HostPorts, usage.Flows, orNone(usage.Uplinks), len(usage.Containers), orNone(usage.Containers))
}

func orNone(names []string) string { return cmp.Or(strings.Join(names, ", "), "none") }
