package main

import (
	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
)

func newUpgrade() *cobra.Command {
	var flags output.Flags
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "replace the loaded programs with those in this binary",
		Long: `Replaces the loaded programs, newer or older, with those in this binary.
No packet and no connection is lost.`,
		Example: "  ebpfnetctl upgrade\n  ebpfnetctl upgrade -o json",
		Args:    noWords,
		RunE:    func(cmd *cobra.Command, _ []string) error { return upgrade(cmd, flags) },
	}
	flags.AddToVerb(cmd.Flags())
	return cmd
}

// upgrade prints what it has replaced.
func upgrade(cmd *cobra.Command, flags output.Flags) error {
	ctx, done := withLocks(cmd)
	defer done()
	replaced, err := loader.Upgrade(ctx, loader.Options{})
	if err != nil {
		return err
	}
	p := output.New(cmd.OutOrStdout(), flags)
	return p.Document(replaced, "", func() {
		if replaced.FromBuild == replaced.ToBuild {
			p.Printf("already loaded: %s\n", programVersion(replaced.ToRevision, replaced.ToBuild))
			return
		}
		p.Printf("replaced %s with %s; programs replaced on devices: %d\n", programVersion(replaced.FromRevision, replaced.FromBuild),
			programVersion(replaced.ToRevision, replaced.ToBuild), replaced.Programs)
	})
}
