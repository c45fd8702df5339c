package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// removed are commands, and flags of commands, of the release before, with what to use instead.
var removed = []struct{ command, flag, shorthand, instead string }{
	{"diff", "", "", "`ebpfnetctl doctor`, which compares containers with what ADD gave them"},
	{"flows", "watch", "w", "`watch -n2 ebpfnetctl flows`"},
	{"nodes", "probe", "", "`ebpfnetctl doctor --peers`"},
	{"top", "samples", "n", "`watch -n2 ebpfnetctl top`"},
	{"trace", "live", "", "`ebpfnetctl drops --follow` or pwru"},
}

// addRemoved adds the removed commands and flags to the root. They do nothing but report what to use, and exit with 2.
func addRemoved(root *cobra.Command) {
	for _, r := range removed {
		if r.flag == "" {
			root.AddCommand(&cobra.Command{
				Use:                r.command,
				Hidden:             true,
				DisableFlagParsing: true,
				RunE: func(*cobra.Command, []string) error {
					return usageError{fmt.Errorf("%s was removed: use %s", r.command, r.instead)}
				},
			})
			continue
		}
		cmd, _, _ := root.Find([]string{r.command}) // it exists
		cmd.Flags().BoolFuncP(r.flag, r.shorthand, "", func(string) error { return fmt.Errorf("was removed: use %s", r.instead) })
		_ = cmd.Flags().MarkHidden(r.flag) // it was just added
	}
}
