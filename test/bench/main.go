// Command bench compares ebpfnet with a bare veth, plain routing and the reference plugins, side by
// side in its own namespaces. README.md explains the method, RESULTS.md has the results.
//
// variants.go has what is compared, plan.go how much of it, path.go the paths of traffic,
// engine*.go and socket.go the traffic generators, attach.go ADD and DEL, rounds.go the order of
// measurements, target.go the targets; scale.go what else is on a node, which fill.go and load.go create.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const help = `usage: bench [-quick] [-scale] [-only LIST] [-paths LIST] [-workloads LIST] [-families LIST]
             [-rounds N] [-slice DURATION] [-services N] [-json FILE] [-results FILE]

Measures traffic (UDP packets, round trips, connections, TCP streams), ADD and DEL with a bare veth,
plain routing, bridge + portmap, ptp + portmap and ebpfnet, and ebpfnet among many containers. All setups exist at the same time, in
network namespaces. Every round measures all of them in turn; the results are medians of ratios
within a round, with quartiles. Both ends of traffic are threads of this process on one CPU; they use
plain system calls and do not allocate.

The benchmark runs in its own namespaces, which the kernel removes with it, even if it is killed: it
changes nothing on this host. It needs root, and the plugins in $EBPFNET_BIN_DIR, or Go and the source
tree to build them. Other load on the machine hardly affects traffic, but it affects ADD and DEL a lot.

  -quick           the short plan, about three minutes
  -json FILE       write all results
  -results FILE    write the tables

A part of a run, for developers. A LIST has commas; a wrong name makes bench print the known ones:

  -scale           only what many containers, ports, flows and new connections cost
  -only LIST       these variants
  -paths LIST      these paths
  -workloads LIST  these workloads; "calls" stands for ADD and DEL
  -families LIST   IPv4 or IPv6
  -rounds N        number of rounds
  -slice DURATION  duration of each measurement: 80ms
  -services N      number of services in kube-proxy's tables: 1000

exit status: 0 measured, whether or not targets are met; 1 could not measure; 2 wrong usage;
             128 + N ended by signal N
`

type options struct {
	quick, scale bool
	selection
	rounds        int           // 0: the plan's
	services      int           // 0: kubeServices
	slice         time.Duration // 0: the plan's
	json, results string
}

// partial reports whether a run measures less than a plan says.
func (o *options) partial() bool {
	return o.scale || o.rounds != 0 || o.slice != 0 || o.services != 0 || o.narrow()
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
	testenv.Isolate()

	m := &testenv.Machine{Name: "bench"}
	m.ExitOnSignal()
	// Namespaces are not cleaned up step by step: the kernel is faster.
	exitOn(m.Protect(func() error { return bench(m, opts) }))
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

func parseOptions(args []string) (options, error) {
	var (
		opts                                       options
		variants, paths, workloads, familiesByName string
	)
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // main prints
	flags.BoolVar(&opts.quick, "quick", false, "")
	flags.BoolVar(&opts.scale, "scale", false, "")
	flags.StringVar(&variants, "only", "", "")
	flags.StringVar(&paths, "paths", "", "")
	flags.StringVar(&workloads, "workloads", "", "")
	flags.StringVar(&familiesByName, "families", "", "")
	flags.IntVar(&opts.rounds, "rounds", 0, "")
	flags.IntVar(&opts.services, "services", 0, "")
	flags.DurationVar(&opts.slice, "slice", 0, "")
	flags.StringVar(&opts.json, "json", "", "")
	flags.StringVar(&opts.results, "results", "", "")
	err := flags.Parse(args)
	if err != nil {
		return opts, err
	}
	if flags.NArg() > 0 {
		return opts, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if opts.scale && workloads == "" {
		workloads = strings.Join(append([]string{"udp-dns", streamName}, scaledWorkloads...), ",")
	}
	if opts.services > 0 {
		kubeServices = opts.services
	}
	if opts.selection, err = parseSelection(variants, paths, workloads, familiesByName); err != nil {
		return opts, err
	}
	return opts, opts.check()
}

func (o *options) check() error {
	switch {
	case o.rounds < 0:
		return fmt.Errorf("-rounds %d: expected 1 or more", o.rounds)
	case o.services < 0 || o.services > maxServices:
		return fmt.Errorf("-services %d: expected 1 to %d", o.services, maxServices)
	case o.slice != 0 && o.slice < minSlice:
		return fmt.Errorf("-slice %v: expected %v or more", o.slice, minSlice)
	case o.results != "" && (o.quick || o.partial()):
		return errors.New("-results needs the whole benchmark: omit -quick and what selects a part")
	}
	return nil
}

// minSlice is long enough for several of a clock's long parts.
const minSlice = 5 * time.Millisecond
