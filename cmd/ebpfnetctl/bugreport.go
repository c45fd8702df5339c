package main

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/bugreport"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/runtimes"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/wanted"
)

func newBugreport() *cobra.Command {
	var dataDir, confDir, cacheDir string
	cmd := &cobra.Command{
		Use:   "bugreport FILE",
		Short: "an archive of all that helps to find a fault",
		Long: `Writes a compressed tar archive (.tar.gz) with what all nouns print, the maps as
JSON, versions, settings, devices, routes and rules of the host, and the network
configurations. What cannot be had is a file in it that says why. FILE must not
exist; - is the standard output.

Addresses and names are kept. What looks like a secret is left out, but nobody
knows all of them: look through the files before you give them away.`,
		Example: `  ebpfnetctl bugreport ebpfnet.tar.gz
  ssh root@node ebpfnetctl bugreport - > node.tar.gz`,
		RunE: func(cmd *cobra.Command, words []string) error {
			if len(words) != 1 || words[0] == "" {
				return usageError{errors.New("bugreport: expected the name of a file that does not exist, or -")}
			}
			return report(cmd, words[0], bugreport.Options{
				Nouns:   nouns(cmd),
				Metrics: append(withFlagsOf(cmd, "metrics"), "--containers", "--flows"),
				ConfDir: confDir,
			})
		},
	}
	addDataDir(cmd, &dataDir)
	cmd.Flags().StringVar(&confDir, "conf-dir", runtimes.DefaultConfDir, "`DIR` has the network configurations")
	cmd.Flags().StringVar(&cacheDir, "cache-dir", wanted.DefaultCacheDir, "`DIR` is libcni's cache")
	return cmd
}

// nouns are the commands that list something without an argument.
func nouns(cmd *cobra.Command) (all [][]string) {
	for _, command := range cmd.Root().Commands() {
		isNoun := slices.Contains(output.FormatNames(command.Flags()), string(output.Name))
		if isNoun && command.ValidateArgs(nil) == nil {
			all = append(all, withFlagsOf(cmd, command.Name()))
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

// report writes the archive and nothing else. One that is not whole is removed.
func report(cmd *cobra.Command, name string, o bugreport.Options) error {
	done := output.Waiting(cmd.ErrOrStderr(), "commands that look at this host")
	defer done()
	if name == "-" {
		return reportTo(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr(), "the report", o)
	}
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = reportTo(cmd.Context(), file, cmd.OutOrStdout(), name, o)
	if err = errors.Join(err, file.Close()); err != nil {
		return errors.Join(err, os.Remove(name))
	}
	return nil
}

func reportTo(ctx context.Context, to, words io.Writer, name string, o bugreport.Options) error {
	if columns, _ := output.TerminalSize(to); columns > 0 {
		return errors.New("bugreport: the standard output is a terminal: expected a file or a pipe")
	}
	written, err := bugreport.Write(ctx, to, o)
	if err != nil {
		return err
	}
	output.Printf(words, "%s has %d files, with addresses and names of containers; look through them before you give them away\n", name, written.Files)
	for _, failed := range written.Failed {
		output.Printf(words, "not all could be had: %s says why\n", failed)
	}
	return nil
}
