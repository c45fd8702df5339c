package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// removedCommands are commands of the release before, with what to use instead.
var removedCommands = map[string]string{
	"diff": "`ebpfnetctl doctor`, which compares containers with what ADD gave them",
}

// removedFlags are flags of the release before, with what to use instead.
var removedFlags = []struct{ command, flag, shorthand, instead string }{
	{"flows", "watch", "w", "`watch -n2 ebpfnetctl flows`"},
	{"nodes", "probe", "", "`ebpfnetctl doctor --peers`"},
	{"top", "samples", "n", "`watch -n2 ebpfnetctl top`"},
	{"trace", "live", "", "`ebpfnetctl drops --follow` or pwru"},
}

// addRemoved adds the removed commands and flags to the root. They do nothing but report what to use, and exit with 2.
func addRemoved(root *cobra.Command) {
	for name, instead := range removedCommands {
		root.AddCommand(&cobra.Command{
			Use:                name,
			Hidden:             true,
			DisableFlagParsing: true,
			RunE: func(*cobra.Command, []string) error {
				return usageError{fmt.Errorf("%s was removed: use %s", name, instead)}
			},
		})
	}
	for _, removed := range removedFlags {
		cmd, _, err := root.Find([]string{removed.command})
		if err != nil {
			continue // the command is removed, too
		}
		flags := cmd.Flags()
		flags.BoolFuncP(removed.flag, removed.shorthand, "", func(string) error { return fmt.Errorf("was removed: use %s", removed.instead) })
		_ = flags.MarkHidden(removed.flag) // it was just added
	}
}
