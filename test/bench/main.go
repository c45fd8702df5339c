// Command bench compares ebpfnet with a bare veth, with plain routing, and with the reference
// plugins, side by side in namespaces of its own.
//
// One file per thing to know: variants.go is what is compared, form.go how much of it, path.go the
// ways that traffic takes, engine*.go and socket.go how it is made, attach.go ADD and DEL,
// rounds.go the order of everything, target.go what must come out of it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const help = `usage: bench [-quick] [-only NAMES] [-json FILE] [-svg FILE] [-readme FILE]
       bench -from FILE [-svg FILE] [-readme FILE]

Measures traffic (UDP packets, round trips, connections, TCP streams), ADD and DEL of a bare veth,
plain routing, bridge + portmap, ptp + portmap and ebpfnet. All of them are set up at once, in
network namespaces; rounds go from one to the next, and what is told are medians of ratios within
a round, with the quartiles around them. Both ends of traffic are on one CPU, threads of this
process that use plain system calls and make no memory.

It touches nothing of this host: all of it happens in namespaces of its own, which the kernel removes
with it, also if it is killed. It needs root, and plugins in $EBPFNET_BIN_DIR, or Go and the source
tree to build them. Other work on the machine does little to traffic, and a lot to ADD and DEL.

  -quick         the short form, of two minutes
  -only NAMES    only these variants, separated by commas (and no targets)
  -from FILE     measure nothing: tell what an earlier run has written by -json
  -json FILE     write everything that was measured
  -svg FILE      write a chart
  -readme FILE   renew the figures in the README

exit codes: 0 measured (targets may be missed), 1 could not measure, 2 wrong usage,
            130 interrupted (128 and the signal's number)
`

type options struct {
	quick                   bool
	only                    string
	from, json, svg, readme string
}

func main() {
	opts, err := parseOptions(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		fmt.Print(help)
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n\n%s", err, help)
		os.Exit(2)
	}
	if opts.from != "" {
		r, err := readResult(opts.from)
		if err == nil {
			err = r.tell(opts)
		}
		exitOn(err)
		return
	}
	testenv.Isolate()
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), 4)) // both ends keep one while they wait

	m := &testenv.Machine{Name: "bench"}
	m.ExitOnSignal()
	// Nothing is cleaned up step by step: the kernel is faster.
	exitOn(m.Protect(func() error { return bench(m, opts) }))
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

func parseOptions(args []string) (options, error) {
	var opts options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // main prints
	flags.BoolVar(&opts.quick, "quick", false, "")
	flags.StringVar(&opts.only, "only", "", "")
	flags.StringVar(&opts.from, "from", "", "")
	flags.StringVar(&opts.json, "json", "", "")
	flags.StringVar(&opts.svg, "svg", "", "")
	flags.StringVar(&opts.readme, "readme", "", "")
	if err := flags.Parse(args); err != nil {
		return opts, err
	}
	if flags.NArg() > 0 {
		return opts, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if opts.readme != "" && (opts.quick || opts.only != "") {
		return opts, errors.New("-readme is for the whole benchmark: without -quick and -only")
	}
	if opts.from != "" && (opts.quick || opts.only != "" || opts.json != "") {
		return opts, errors.New("-from measures nothing: it goes with -svg and -readme alone")
	}
	return opts, nil
}
