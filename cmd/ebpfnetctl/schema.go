package main

import (
	"embed"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
)

// schemas are the JSON schemas of what -o json prints, one per command.
//
//go:embed schema/*.json
var schemas embed.FS

func newSchema() *cobra.Command {
	return &cobra.Command{
		Use:   "schema [COMMAND]",
		Short: "JSON schema of what a command prints with -o json",
		Long: `Prints the JSON schema of what a command prints with -o json, or the commands
that have one. A later version may add fields; the release notes say if one is
removed or changed.`,
		Example:           "  ebpfnetctl schema\n  ebpfnetctl schema attachments",
		Args:              oneWord,
		ValidArgsFunction: cobra.FixedCompletions(schemaNames(), cobra.ShellCompDirectiveNoFileComp),
		RunE:              printSchema,
	}
}

func printSchema(cmd *cobra.Command, words []string) error {
	if len(words) == 0 {
		output.Printf(cmd.OutOrStdout(), "%s\n", output.Raw(strings.Join(schemaNames(), "\n")))
		return nil
	}
	text, err := schemas.ReadFile("schema/" + words[0] + ".json")
	if err != nil {
		return usageError{fmt.Errorf("schema %s: expected one of %s", words[0], strings.Join(schemaNames(), ", "))}
	}
	_, err = cmd.OutOrStdout().Write(text)
	return err
}

func schemaNames() (names []string) {
	files, _ := fs.Glob(schemas, "schema/*.json") // the pattern is right
	for _, file := range files {
		names = append(names, strings.TrimSuffix(path.Base(file), ".json"))
	}
	return names
}
