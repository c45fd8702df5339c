package main

import (
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newMan writes the manual, for `make man` and packages.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIRECTORY",
		Short:   "write the manual pages",
		Long:    "Writes a manual page for each command into a directory that exists.",
		Example: "  ebpfnetctl man /usr/local/share/man/man8",
		Hidden:  true,
		RunE: func(cmd *cobra.Command, words []string) error {
			if len(words) != 1 {
				return usageError{errors.New("man: expected a directory")}
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true // packages that are built again are the same, if they set SOURCE_DATE_EPOCH
			return doc.GenManTree(root, &doc.GenManHeader{Section: "8", Source: "ebpfnet", Manual: "ebpfnet"}, words[0])
		},
	}
}
