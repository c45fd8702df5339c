package main

import (
	"errors"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/bugreport"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

func newBugreport() *cobra.Command {
	var dirs directories
	var of runtimes.Options
	cmd := &cobra.Command{
		Use:   "bugreport FILE",
		Short: "an archive of what helps to find a fault",
		Long: `Writes a compressed tar archive (.tar.gz) with the JSON of all read commands,
the network configurations, and versions, settings, devices, routes, rules and
journal of the host. missing.txt in it lists what is missing, and why. FILE must
not exist; - is the standard output.

Addresses and names are kept. What looks like a secret is left out, but the
filter cannot recognize every secret: review the archive before you share it.`,
		Example: `  ebpfnetctl bugreport ebpfnet.tar.gz
  ssh root@node ebpfnetctl bugreport - > node.tar.gz`,
		RunE: func(cmd *cobra.Command, words []string) error {
			if len(words) != 1 || words[0] == "" {
				return usageError{errors.New("bugreport: expected the name of a file that does not exist, or -")}
			}
			return report(cmd, words[0], bugreport.Options{
				Commands: append(readCommands(cmd), append(withFlagsOf(cmd, "metrics"), "--containers", "--flows")),
				Runtimes: of,
			})
		},
	}
	dirs.add(cmd)
	cmd.Flags().StringVar(&of.ConfDir, "conf-dir", "", "`DIR` has the network configurations, if not where the runtime looks")
	return cmd
}

// readCommands are the read commands that need no argument, with their JSON.
func readCommands(cmd *cobra.Command) (all [][]string) {
	for _, command := range cmd.Root().Commands() {
		if slices.Contains(output.Formats(command.Flags()), output.Name) && command.ValidateArgs(nil) == nil {
			all = append(all, append(withFlagsOf(cmd, command.Name()), "--output=json"))
		}
	}
	return all
}

// withFlagsOf returns the words for a command that has flags of cmd.
func withFlagsOf(cmd *cobra.Command, name string) []string {
	words := []string{name}
	other, _, _ := cmd.Root().Find(words) // it exists
	cmd.Flags().Visit(func(flag *pflag.Flag) {
		if other.Flags().Lookup(flag.Name) != nil {
			words = append(words, "--"+flag.Name+"="+flag.Value.String())
		}
	})
	return words
}

// report writes the archive. An incomplete file is removed.
func report(cmd *cobra.Command, name string, o bugreport.Options) (err error) {
	to, messages := cmd.OutOrStdout(), cmd.ErrOrStderr()
	if name != "-" {
		file, errOpen := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errOpen != nil {
			return errOpen
		}
		defer func() {
			if err = errors.Join(err, file.Close()); err != nil {
				err = errors.Join(err, os.Remove(name))
			}
		}()
		to, messages = file, to
	}
	written, err := bugreport.Write(cmd.Context(), to, o)
	if err != nil {
		return err
	}
	output.Printf(messages, "%s has %d files, with addresses and names of containers; review them before you share it\n", name, written.Files)
	for _, missing := range written.Missing {
		output.Printf(messages, "missing: %s\n", missing)
	}
	return nil
}
