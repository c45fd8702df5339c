package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// shells are those that ebpfnetctl can write a completion for.
var shells = []string{"bash", "zsh", "fish"}

func newCompletion() *cobra.Command {
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "completion for bash, zsh or fish",
		Long: `Prints a script that completes commands, flags and the names of containers in
bash, zsh or fish. Names that a shell could misread are not completed.`,
		Example: `  ebpfnetctl completion bash > /etc/bash_completion.d/ebpfnetctl
  ebpfnetctl completion zsh > /usr/local/share/zsh/site-functions/_ebpfnetctl
  ebpfnetctl completion fish > /etc/fish/completions/ebpfnetctl.fish`,
		ValidArgsFunction: cobra.FixedCompletions(shells, cobra.ShellCompDirectiveNoFileComp),
		RunE: func(cmd *cobra.Command, words []string) error {
			if len(words) != 1 || !slices.Contains(shells, words[0]) {
				return usageError{fmt.Errorf("completion: %q: expected one of %s", strings.Join(words, " "), strings.Join(shells, ", "))}
			}
			return printCompletion(cmd.Root(), words[0], cmd.OutOrStdout())
		},
	}
}

func printCompletion(root *cobra.Command, shell string, to io.Writer) error {
	const withDescriptions = true

	switch shell {
	case "bash":
		return root.GenBashCompletionV2(to, withDescriptions)
	case "zsh":
		return root.GenZshCompletion(to)
	default:
		return root.GenFishCompletion(to, withDescriptions)
	}
}
