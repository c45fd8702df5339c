package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/wanted"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

func newDiff() *cobra.Command {
	var flags output.Flags
	var dataDir, cacheDir string
	cmd := &cobra.Command{
		Use:   "diff",
		Short: "what is not as ADD left it, for all containers",
		Long: `Compares all containers with what they were given, as CHECK does for one: the
interface, addresses, routes, limits, programs, map entries and reservations,
and the host's uplinks and forwarding. What was given is in libcni's cache,
where runtimes keep it. Exits with 3 if there is a difference.`,
		Example: `  ebpfnetctl diff
  ebpfnetctl diff -o json | jq -r '.[] | select(.remedy == "repair") | .what'`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return diff(cmd, output.New(cmd.OutOrStdout(), flags), dataDir, cacheDir)
		},
	}
	flags.AddToNoun(cmd.Flags())
	addDataDir(cmd, &dataDir)
	cmd.Flags().StringVar(&cacheDir, "cache-dir", wanted.DefaultCacheDir, "`DIR` is libcni's cache")
	return cmd
}

// diff prints the differences on stdout, and on stderr which containers could not be compared.
func diff(cmd *cobra.Command, p *output.Printer, dataDir, cacheDir string) error {
	ctx, done := withLocks(cmd)
	defer done()
	found, err := wanted.All(ctx, dataDir, cacheDir)
	if found == nil {
		return err
	}
	for _, container := range found.NotCompared {
		output.Printf(cmd.ErrOrStderr(), "not compared: %s\n", container)
	}
	noun := differenceNoun
	if len(found.NotCompared) > 0 {
		noun.None = "all that could be compared is as ADD left it"
	}
	if err := errors.Join(err, noun.Print(p, found.Differences)); err != nil || len(found.Differences) == 0 {
		return err
	}
	return errFound
}

var differenceNoun = output.Noun[wanted.Difference]{
	Columns: []output.Column[wanted.Difference]{
		{Head: "CONTAINER", Text: differenceOf, Elastic: true},
		{Head: "REMEDY", Text: func(d wanted.Difference) string { return string(d.Remedy) }, Color: func(d wanted.Difference) output.Color {
			if d.Remedy == wanted.Repair {
				return output.Yellow
			}
			return output.Red
		}},
		{Head: "DIFFERENCE", Text: func(d wanted.Difference) string { return d.What }, Wraps: true},
	},
	Name: func(d wanted.Difference) string { return d.What },
	None: "all is as ADD left it",
}

func differenceOf(d wanted.Difference) string {
	var names []string
	for _, a := range d.Containers {
		names = append(names, containerName(&operator.Attachment{Attachment: a}))
	}
	return strings.Join(names, ",")
}
