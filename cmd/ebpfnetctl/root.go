package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// The groups of commands in the help.
const (
	groupLook   = "look"
	groupChange = "change"
	groupTool   = "tool"
)

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "ebpfnetctl",
		Short: "shows the state of ebpfnet on this host and changes it",
		Long: `ebpfnetctl shows the state of ebpfnet on this host and changes it.

Run it as root. It works on the network namespace it runs in; for another one
use "nsenter --net=FILE ebpfnetctl ..." ("ip netns exec" hides the pins).

Exit codes: 0 good, 1 an error, 2 wrong arguments, 3 a command that looks for
something has found it.`,
		Args:          knownCommand,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,

		PersistentPreRunE: needRoot,
	}
	root.SuggestionsMinimumDistance = 2
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetHelpTemplate(helpTemplate)
	root.SetHelpCommand(newHelp())
	addHelpFlag(root)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{fmt.Errorf("%s: %w", cmd.Name(), err)}
	})
	root.AddGroup(
		&cobra.Group{ID: groupLook, Title: "Look (only doctor changes something, with --fix or --send):"},
		&cobra.Group{ID: groupChange, Title: "Change:"},
		&cobra.Group{ID: groupTool, Title: "About ebpfnetctl:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, command := range commands {
			command.GroupID = group
			complete(command)
			root.AddCommand(command)
		}
	}
	add(groupLook,
		newAttachments(),
		newBugreport(),
		newDoctor(),
		newDrops(),
		newFlows(),
		newMetrics(),
		newNodes(),
		newPolicy(),
		newPorts(),
		newStatus(),
		newTop(),
		newTrace(),
	)
	add(groupChange,
		newMigrate(),
		newRepair(),
		newSet(),
		newUnload(),
		newUpgrade(),
	)
	add(groupTool,
		newCompletion(),
		newMan(),
		newSchema(),
		newVersion(),
	)
	return root
}

// complete gives a command and its own commands completion of flags that have choices, no completion of words that they do
// not take, and --help.
func complete(command *cobra.Command) {
	command.Flags().VisitAll(func(flag *pflag.Flag) {
		if choice, ok := flag.Value.(*output.Choice); ok {
			completeWith(command, flag.Name, choice.Known...)
		}
	})
	takesNoWords := command.ValidateArgs([]string{""}) != nil
	if command.ValidArgsFunction == nil && takesNoWords {
		command.ValidArgsFunction = cobra.NoFileCompletions
	}
	addHelpFlag(command)
	for _, child := range command.Commands() {
		complete(child)
	}
}

var effectiveUID = os.Geteuid // tests replace it

// needRoot refuses to look or to change something without root's rights: what cannot be read would look as if it did not
// exist.
func needRoot(cmd *cobra.Command, _ []string) error {
	if cmd.HasParent() && cmd.Parent().HasParent() { // policy explain
		cmd = cmd.Parent()
	}
	if (cmd.GroupID == groupLook || cmd.GroupID == groupChange) && effectiveUID() != 0 {
		return fmt.Errorf("%s needs root's rights: run it as root, for example by sudo", cmd.Name())
	}
	return nil
}

// helpTemplate is the help of a command. Its lines fit a terminal of 80 columns.
//
//go:embed help.tmpl
var helpTemplate string

func addHelpFlag(cmd *cobra.Command) {
	cmd.InitDefaultHelpFlag()
	cmd.Flags().Lookup("help").Usage = "print this help"
}

func newHelp() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "what a command does, with examples",
		Long:    "Prints what a command does, its flags, and examples.",
		Example: "  ebpfnetctl help set",
		GroupID: groupTool,
		RunE: func(cmd *cobra.Command, words []string) error {
			target, rest, err := cmd.Root().Find(words)
			if err != nil || len(rest) > 0 {
				return knownCommand(cmd.Root(), words)
			}
			return target.Help()
		},
	}
	addHelpFlag(cmd)
	return cmd
}

// knownCommand checks the arguments of ebpfnetctl itself. cobra passes it only words that begin with no command.
func knownCommand(root *cobra.Command, words []string) error {
	if len(words) == 0 {
		return nil
	}
	err := fmt.Errorf("no such command: %s", words[0])
	if similar := root.SuggestionsFor(words[0]); len(similar) > 0 {
		err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(similar, " or "))
	}
	return usageError{err}
}

// noWords is for commands that have flags only.
func noWords(cmd *cobra.Command, words []string) error { return atMost(cmd, words, 0) }

// oneWord is for commands with one optional argument.
func oneWord(cmd *cobra.Command, words []string) error { return atMost(cmd, words, 1) }

func atMost(cmd *cobra.Command, words []string, maximum int) error {
	if len(words) > maximum {
		return usageError{fmt.Errorf("%s: unexpected argument %q", cmd.Name(), words[maximum])}
	}
	return nil
}

// containerOptions are the flags and the argument of commands that list containers, or what these have.
type containerOptions struct {
	output.Flags
	dirs  directories
	words []string
}

// addTo adds them to a command, with the end of its help. run prints.
func (o *containerOptions) addTo(cmd *cobra.Command, run func(*cobra.Command, *output.Printer) error) *cobra.Command {
	o.AddToRead(cmd.Flags())
	o.dirs.add(cmd)
	cmd.Long += "\n\n" + containerHelp
	cmd.Args, cmd.ValidArgsFunction = oneWord, completeContainers(&o.dirs, 1)
	cmd.RunE = func(cmd *cobra.Command, words []string) error {
		o.words = words
		p := output.New(cmd.OutOrStdout(), o.Flags)
		err := run(cmd, p)
		if follows, _ := cmd.Flags().GetBool("follow"); follows || len(words) > 0 {
			return err
		}
		return beforeLoad(p, err)
	}
	return cmd
}

// noneLoaded prints a list that is empty because nothing is loaded.
var noneLoaded = output.Table[struct{}]{None: "nothing is loaded yet: the first ADD loads the datapath"}

// beforeLoad prints an empty list if err says that nothing is loaded, and returns any other error.
func beforeLoad(p *output.Printer, err error) error {
	if errors.Is(err, loader.ErrNotLoaded) {
		return noneLoaded.Print(p, nil)
	}
	return err
}

// sortFlag adds --sort, whose values are known.
func sortFlag(cmd *cobra.Command, value *string, usage string, known ...string) {
	cmd.Flags().Var(&output.Choice{Value: value, Known: known}, "sort", usage)
}

// directories are where the records and the names of containers are.
type directories struct{ data, cache string }

// add adds the flags of commands that show containers, or have an argument CONTAINER.
func (d *directories) add(cmd *cobra.Command) {
	addDataDir(cmd, &d.data)
	cmd.Flags().StringVar(&d.cache, "cache-dir", containers.DefaultCacheDir, "`DIR` is libcni's cache, which has the containers' names")
}

// addDataDir adds the flag of commands that read records.
func addDataDir(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "data-dir", "", "`DIR` is the networks' dataDir, if not "+record.DefaultDir)
}

// completeWith completes a flag of a command by fixed values.
func completeWith(cmd *cobra.Command, flag string, values ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)) // the flag exists
}

// withLocks bounds the wait of a command that takes locks. The caller must call done.
func withLocks(cmd *cobra.Command) (ctx context.Context, done func()) {
	const timeout = 20 * time.Second
	return context.WithTimeout(cmd.Context(), timeout)
}
