// Command ebpfnetctl shows an operator what ebpfnet has on this host. Nouns only read.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

const usage = `ebpfnetctl shows what ebpfnet has on this host.

  ebpfnetctl status [-o json]   what is loaded, where, what it costs, what was dropped

It looks at the network namespace it runs in: run it as root on the host, or by
"nsenter --net=FILE ebpfnetctl ..." for another one ("ip netns exec" hides the pins).
Exit codes: 0 good, 1 an error, which it names, 2 wrong arguments.
`

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 || args[0] == "help" || args[0] == "--help" || args[0] == "-h" {
		fmt.Fprint(stdout, usage)
		return 0
	}
	flags := flag.NewFlagSet("ebpfnetctl "+args[0], flag.ContinueOnError)
	flags.SetOutput(io.Discard) // what it would say is said here
	output := flags.String("o", "text", "text or json")
	err := flags.Parse(args[1:])
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(stdout, usage)
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "ebpfnetctl: %v\n\n%s", err, usage)
		return 2
	}
	if args[0] != "status" || flags.NArg() > 0 || (*output != "text" && *output != "json") {
		fmt.Fprintf(stderr, "ebpfnetctl: cannot do %q\n\n%s", args, usage)
		return 2
	}
	if err := printStatus(stdout, *output == "json"); err != nil {
		fmt.Fprintf(stderr, "ebpfnetctl: %v\n", err)
		return 1
	}
	return 0
}
