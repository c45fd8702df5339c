// Command demo shows ebpfnet at work, to a person who has never seen it: it makes
// a node, an outside host and three pods in namespaces of its own, is their
// container runtime, sends traffic, and tells what became of it.
//
// One file per thing to know: check.go is what must be there before anything
// starts, conflist.go the network that is set up, scene.go the machines, steps.go
// the story and steps_*.go its chapters, report.go how it is told.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const help = `usage: demo [-conflist FILE] [-pause] [-o text|json]

Shows what ebpfnet does and that it works, in a few seconds: a node, an outside host
and three pods, connected by the CNI plugin "ebpfnet" as a container runtime would do
it, through libcni. Then traffic of every kind over IPv4 and IPv6, a look into the
datapath's maps, and the removal of everything, with the proof that nothing is left.

It touches nothing of this host. All of it happens in mount, network and PID
namespaces of the demo's own, with a /run, /sys/fs/bpf and /var/lib/cni of their own,
and the kernel removes them with the demo, also if it is killed. A datapath of ebpfnet
that this host may be running is another one.

It needs root, Linux 5.10 or newer, and no tool but itself and the plugin, which it
looks for beside its own executable, or in $EBPFNET_BIN_DIR.

  -conflist FILE   the network: a CNI configuration list, or a Markdown file, whose first
                   json block with "ebpfnet" is taken. Default: ../README.md, seen
                   from the executable
  -pause           wait for Enter after each step, to look around meanwhile
  -o text          tell it to a person (the default); colours on a terminal alone, and
                   not where NO_COLOR is set
  -o json          print one JSON object at the end instead: ok, and steps, each with name,
                   ok and details. "missing" or "error" says what went wrong

exit codes: 0    everything worked
            1    something did not, or this host cannot run it; the last lines say what
            2    wrong usage
            130  interrupted (128 and the signal's number)
`

// outerEnv tells the demo inside of its namespaces the process id of the one
// outside, for the hint of -pause and to not check the host twice.
const outerEnv = "EBPFNET_DEMO_OUTER_PID"

type options struct {
	conflist string
	pause    bool
	json     bool
}

func main() {
	opts, err := parseOptions(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		fmt.Print(help)
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n\n%s", err, help)
		os.Exit(2)
	}
	r := newReport(os.Stdout, opts.json)
	if os.Getpid() != 1 || os.Getenv(outerEnv) == "" {
		if missing := check(opts); len(missing) > 0 {
			os.Exit(r.cannotRun(missing))
		}
		os.Setenv(outerEnv, strconv.Itoa(os.Getpid()))
	}
	testenv.Isolate()

	m := &testenv.Machine{Name: "demo"}
	m.ExitOnSignal()
	err = m.Protect(func() error { return run(m, r, opts) })
	os.Exit(r.finish(errors.Join(err, m.CleanUp())))
}

func parseOptions(args []string) (options, error) {
	var opts options
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // main prints
	flags.StringVar(&opts.conflist, "conflist", "", "")
	flags.BoolVar(&opts.pause, "pause", false, "")
	output := flags.String("o", "text", "")
	if err := flags.Parse(args); err != nil {
		return opts, err
	}
	opts.json = *output == "json"
	switch {
	case flags.NArg() > 0:
		return opts, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case *output != "json" && *output != "text":
		return opts, fmt.Errorf("-o %q: expected text or json", *output)
	case opts.json && opts.pause:
		return opts, errors.New("-pause is for a person, -o json for a program: choose one")
	}
	return opts, nil
}
