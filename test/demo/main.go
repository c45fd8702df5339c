// Command demo shows ebpfnet at work to somebody who has never seen it. In its own namespaces
// it builds a node, a host outside and three pods, connects the pods as a container runtime
// does, sends traffic and shows what the datapath made of it.
//
// main.go has the steps in order, network.go the machines with ADD and DEL, traffic.go the
// traffic, state.go a look at the node.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const usage = `usage: demo CONFLIST

Connects three pods by the network configuration list CONFLIST, sends traffic over IPv4 and
IPv6, shows the state of the datapath and disconnects the pods. Every line with a tick is a
check; the demo stops at the first one that fails.

The demo runs in its own mount, network and PID namespaces with its own /run, /sys/fs/bpf and
/var/lib/cni, which the kernel removes when the demo ends, even if it is killed. It changes
nothing on this host and leaves a running ebpfnet alone.

It needs root and Linux 5.10 or newer, and no tools. The plugin comes from $EBPFNET_BIN_DIR;
if that is not set, the demo builds it from the source tree around the working directory.

exit status: 0 all checks passed, 1 a check failed or this host cannot run the demo,
2 wrong usage, 128 + N ended by signal N
`

func main() {
	flag.Usage = func() { fmt.Fprint(flag.CommandLine.Output(), usage) }
	flag.Parse()
	if flag.NArg() != 1 {
		flag.Usage()
		os.Exit(2)
	}
	testenv.Isolate()

	m := &testenv.Machine{Name: "demo"}
	m.ExitOnSignal()
	err := m.Protect(func() error { return run(m, os.Stdout, flag.Arg(0)) })
	if err := errors.Join(err, m.CleanUp()); err != nil {
		fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		os.Exit(1)
	}
}

// demo is one run: the machines, and what the steps share.
type demo struct {
	*testenv.Machine
	out    io.Writer
	checks int // passed so far

	topology *testenv.Topology
	runtime  *testenv.Runtime
	pods     []*testenv.Pod
	datapath *loader.Datapath // the node's, loaded by the first ADD
}

// steps are the chapters of the demo, in order.
var steps = []struct {
	title string
	run   func(*demo) error
}{
	{"ADD: connect three pods. Each call is one short process.", (*demo).addPods},
	{"Pod to pod: every pod is seen under its own address.", (*demo).podToPod},
	{"Pod to the outside: \"ipMasq\" replaces the pod's address with the node's.", (*demo).podToOutside},
	{"Host port 8080: forwarded to port 80 of pod-c. Clients on this host are seen as the gateway.", (*demo).toHostPort},
	{"State: all of it is in pinned BPF maps.", (*demo).showMaps},
	{"Nothing else: no bridge, no rules, no daemon.", (*demo).showNothingElse},
	{"CHECK: compare the pods with what ADD left.", (*demo).checkPods},
	{"DEL: disconnect the pods. The programs stay loaded for the next ADD.", (*demo).deletePods},
}

func run(m *testenv.Machine, out io.Writer, conflist string) error {
	start := time.Now()
	d := &demo{Machine: m, out: out}
	if err := d.prepare(conflist); err != nil {
		return err
	}
	for i, step := range steps {
		fmt.Fprintf(out, "%d. %s\n", i+1, step.title)
		if err := m.Protect(func() error { return step.run(d) }); err != nil {
			return fmt.Errorf("step %d failed: %w", i+1, err)
		}
	}
	fmt.Fprintf(out, "%d checks passed in %.1f s, all in the demo's own namespaces: this host did not change.\n",
		d.checks, time.Since(start).Seconds())
	return nil
}

// ok prints a check that passed: its subject and the result.
func (d *demo) ok(subject, format string, args ...any) {
	d.checks++
	fmt.Fprintf(d.out, "  ✓ %-30s %s\n", subject, fmt.Sprintf(format, args...))
}
