package main

import (
	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
)

func newLoad() *cobra.Command {
	return &cobra.Command{
		Use:     "load",
		Short:   "load the datapath now instead of at the first ADD",
		Long:    "Loads the datapath now, instead of at the first ADD. One that is loaded stays.",
		Example: "  ebpfnetctl load",
		Args:    noWords,
		RunE:    func(cmd *cobra.Command, _ []string) error { return load(cmd) },
	}
}

// load loads the datapath if it is not loaded.
func load(cmd *cobra.Command) error {
	ctx, done := withLocks(cmd)
	defer done()
	datapath, err := loader.Open(ctx, loader.Options{})
	if err != nil {
		return err
	}
	defer datapath.Close()

	output.Printf(cmd.OutOrStdout(), "loaded, pinned in %s\n", datapath.Dir())
	return nil
}
