// Command ebpfnetctl shows an operator what ebpfnet has on this host. Nouns only read;
// verbs change something, and say what.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"
)

const usage = `ebpfnetctl shows what ebpfnet has on this host, and mends it.

  ebpfnetctl status [-o json]   what is loaded, where, what it costs, what was dropped
  ebpfnetctl attachments [-o json]
                                the containers: addresses, host ports, devices, and what the
                                runtime said of them (aliases, cgroup, labels)
  ebpfnetctl load               load the datapath now, and not at the first ADD
  ebpfnetctl upgrade [-o json]  put this binary's programs in the place of those that are
                                loaded, newer or older ones; no packet and no flow is lost
  ebpfnetctl repair [-o json]   put back programs that another tool has taken off, follow
                                changes of the uplinks; for hooks of network managers, too
  ebpfnetctl set NETWORK[/CONTAINER[/INTERFACE]] KEY=VALUE...
                                change antiSpoof, ingressPolicy, ingressRate, ingressBurst,
                                egressRate or egressBurst of containers that run, until they
                                are gone; the configuration is for new ones
  ebpfnetctl unload [--yes]     take all of ebpfnet out of the kernel; without --yes say
                                what that would break, and do nothing

--data-dir DIR names the dataDir of the networks, where it is not the usual one.
It looks at the network namespace it runs in: run it as root on the host, or by
"nsenter --net=FILE ebpfnetctl ..." for another one ("ip netns exec" hides the pins).
Exit codes: 0 good, 1 an error, which it names, 2 wrong arguments.
`

// options are those of all commands.
type options struct {
	json    bool
	yes     bool
	dataDir string
	words   []string // behind the flags; for set alone
}

var commands = map[string]func(context.Context, io.Writer, options) error{
	"status":      printStatus,
	"attachments": printAttachments,
	"load":        load,
	"upgrade":     upgrade,
	"repair":      repair,
	"set":         set,
	"unload":      unload,
}

// wrongArguments is what a command says of its words.
type wrongArguments struct{ error }

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	const lockTimeout = 20 * time.Second

	if len(args) == 0 || args[0] == "help" || args[0] == "--help" || args[0] == "-h" {
		fmt.Fprint(stdout, usage)
		return 0
	}
	flags := flag.NewFlagSet("ebpfnetctl "+args[0], flag.ContinueOnError)
	flags.SetOutput(io.Discard) // what it would say is said here
	output := flags.String("o", "text", "text or json")
	var o options
	flags.BoolVar(&o.yes, "yes", false, "do it")
	flags.StringVar(&o.dataDir, "data-dir", "", "dataDir of the network's configuration")
	err := flags.Parse(args[1:])
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, usage)
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "ebpfnetctl: %v\n\n%s", err, usage)
		return 2
	}
	command, known := commands[args[0]]
	if !known || flags.NArg() > 0 && args[0] != "set" || (*output != "text" && *output != "json") {
		fmt.Fprintf(stderr, "ebpfnetctl: cannot do %q\n\n%s", args, usage)
		return 2
	}
	o.words = flags.Args()
	o.json = *output == "json"
	ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
	defer cancel()
	if err := command(ctx, stdout, o); err != nil {
		fmt.Fprintf(stderr, "ebpfnetctl: %v\n", err)
		if errors.As(err, new(wrongArguments)) {
			return 2
		}
		return 1
	}
	return 0
}
