package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// shells are those that ebpfnetctl can write a completion for.
var shells = map[string]func(root *cobra.Command, to io.Writer) error{
	"bash": func(root *cobra.Command, to io.Writer) error { return root.GenBashCompletionV2(to, true) },
	"fish": func(root *cobra.Command, to io.Writer) error { return root.GenFishCompletion(to, true) },
	"zsh":  (*cobra.Command).GenZshCompletion,
}

func newCompletion() *cobra.Command {
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "completion for bash, zsh or fish",
		Long: `Prints a script that completes commands, flags and the names of containers in
bash, zsh or fish. Names that a shell could misread are not completed.`,
		Example: `  ebpfnetctl completion bash > /etc/bash_completion.d/ebpfnetctl
  ebpfnetctl completion zsh > /usr/local/share/zsh/site-functions/_ebpfnetctl
  ebpfnetctl completion fish > /etc/fish/completions/ebpfnetctl.fish`,
		ValidArgsFunction: cobra.FixedCompletions(slices.Sorted(maps.Keys(shells)), cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, words []string) error {
			shell := strings.Join(words, " ")
			if shells[shell] == nil {
				return usageError{fmt.Errorf("completion: %q: expected bash, fish or zsh", shell)}
			}
			return shells[shell](cmd.Root(), cmd.OutOrStdout())
		},
	}
}
