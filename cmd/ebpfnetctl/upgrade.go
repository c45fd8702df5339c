package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
)

func newUpgrade() *cobra.Command {
	var flags output.Flags
	cmd := &cobra.Command{
		Use:   "upgrade",
		Short: "load the programs in this binary, or replace the loaded ones",
		Long: `Replaces the loaded programs, newer or older, with those in this binary.
No packet and no connection is lost. If nothing is loaded, it loads them now
instead of at the first ADD.`,
		Example: "  ebpfnetctl upgrade\n  ebpfnetctl upgrade -o json",
		Args:    noWords,
		RunE:    func(cmd *cobra.Command, _ []string) error { return upgrade(cmd, flags) },
	}
	flags.AddToWrite(cmd.Flags())
	return cmd
}

func upgrade(cmd *cobra.Command, flags output.Flags) error {
	ctx, done := withLocks(cmd)
	defer done()
	replaced, err := loader.Upgrade(ctx, loader.Options{})
	isNew := errors.Is(err, loader.ErrNotLoaded)
	if isNew {
		replaced, err = load(ctx)
	}
	if err != nil {
		return err
	}
	p := output.New(cmd.OutOrStdout(), flags)
	return p.Document(replaced, "", func() {
		from, to := programVersion(replaced.FromRevision, replaced.FromBuild), programVersion(replaced.ToRevision, replaced.ToBuild)
		switch {
		case isNew:
			p.Printf("loaded: %s\n", to)
		case from == to:
			p.Printf("already loaded: %s\n", to)
		default:
			p.Printf("replaced %s with %s; programs replaced on devices: %d\n", from, to, replaced.Programs)
		}
	})
}

func load(ctx context.Context) (loader.Upgraded, error) {
	datapath, err := loader.Open(ctx, loader.Options{})
	if err != nil {
		return loader.Upgraded{}, err
	}
	defer datapath.Close()
	build, revision := loader.BuildID(datapath.Config.Build), datapath.Config.Revision
	return loader.Upgraded{FromBuild: build, FromRevision: revision, ToBuild: build, ToRevision: revision}, nil
}
