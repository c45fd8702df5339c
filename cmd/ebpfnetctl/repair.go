package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

func newRepair() *cobra.Command {
	var flags output.Flags
	var dataDir string
	var hook bool
	cmd := &cobra.Command{
		Use:   "repair",
		Short: "reattach programs, and follow changes of the host",
		Long: `Reattaches programs that another tool has detached, and follows changes of
uplinks, policy rules, IPsec policies and forwarding.`,
		Example: "  ebpfnetctl repair\n  ebpfnetctl repair --hook    # from a hook of udev or a network manager",
		Args:    noWords,
		RunE:    func(cmd *cobra.Command, _ []string) error { return repair(cmd, flags, dataDir, hook) },
	}
	flags.AddToWrite(cmd.Flags())
	addDataDir(cmd, &dataDir)
	cmd.Flags().BoolVar(&hook, "hook", false, "only follow changes of the host; do nothing where nothing is loaded, or many run at once")
	return cmd
}

// repair prints what it has repaired. For a hook it only follows changes of the host, unless there is
// nothing loaded, or another hook is about to do the same.
func repair(cmd *cobra.Command, flags output.Flags, dataDir string, hook bool) error {
	ctx, done := withLocks(cmd)
	defer done()
	what := (*admin.Host).Repair
	if hook {
		turn, err := loader.TakeTurn(ctx)
		switch {
		case errors.Is(err, loader.ErrNotLoaded):
			return nil
		case turn == nil || err != nil:
			return err
		}
		defer turn.Release()
		what = (*admin.Host).Follow
	}
	op, err := admin.Open(loader.OpenLoaded, dataDir)
	if err != nil {
		return err
	}
	defer op.Close()

	repaired, err := what(op, ctx)
	p := output.New(cmd.OutOrStdout(), flags)
	return errors.Join(err, p.Document(map[string][]string{"repaired": append([]string{}, repaired...)}, "", func() {
		for _, thing := range repaired {
			p.Printf("repaired: %s\n", thing)
		}
		if err == nil && len(repaired) == 0 {
			p.Printf("nothing to repair\n")
		}
	}))
}
