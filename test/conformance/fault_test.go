package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// faultEnv makes the test binary run as the plugin, with the faults in its value, instead of running
// tests. The plugin needs a process of its own, all of whose threads are in the node's namespace.
const faultEnv = "CONFORMANCE_FAULT"

// fault is what goes wrong in the plugin. The strings name a step of ADD.
type fault struct {
	FailBefore  string        // the step fails
	KillBefore  string        // SIGKILL
	LockBefore  string        // another open file takes the datapath's lock for good
	PauseBefore string        // waits for pauseLock
	FailPrint   bool          // stdout cannot be written to
	Deadline    time.Duration // of the whole verb
}

const pauseLock = "/run/pause"

var errInjected = errors.New("injected fault")

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errInjected }

// runAsPlugin runs a verb. It writes the steps of ADD to stderr, and an error to stdout.
func runAsPlugin() int {
	var f fault
	stdin, err := io.ReadAll(os.Stdin)
	if err = errors.Join(err, json.Unmarshal([]byte(os.Getenv(faultEnv)), &f)); err != nil {
		panic(err)
	}
	in := &plugin.Plugin{Stdout: io.Discard, BeforeStep: f.beforeStep}
	if f.FailPrint {
		in.Stdout = fullDisk{}
	}
	verbs := cni.Funcs(in, f.Deadline)
	do := map[string]func(*skel.CmdArgs) error{
		"ADD": verbs.Add, "DEL": verbs.Del, "CHECK": verbs.Check, "STATUS": verbs.Status, "GC": verbs.GC,
	}
	err = do[os.Getenv("CNI_COMMAND")](&skel.CmdArgs{
		ContainerID: os.Getenv("CNI_CONTAINERID"),
		Netns:       os.Getenv("CNI_NETNS"),
		IfName:      os.Getenv("CNI_IFNAME"),
		StdinData:   stdin,
	})
	if err == nil {
		return 0
	}
	var failure *types.Error
	if !errors.As(err, &failure) {
		failure = types.NewError(types.ErrInternal, err.Error(), "")
	}
	failure.Print()
	return 1
}

func (f fault) beforeStep(name string) error {
	fmt.Fprintln(os.Stderr, name)
	if name == f.LockBefore {
		_, err := flock.Acquire(context.Background(), loader.Root, flock.Exclusive) // held until the process ends
		return err
	}
	if name == f.KillBefore {
		return unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	if name == f.PauseBefore {
		lock, err := flock.Acquire(context.Background(), pauseLock, flock.Exclusive)
		return errors.Join(err, lock.Release())
	}
	if name == f.FailBefore {
		return errInjected
	}
	return nil
}

// addWithFault runs ADD with a fault. stopped reports that it did not end in time and was killed.
func (p *pod) addWithFault(t *testing.T, f fault) (call *testenv.Call, stopped bool) {
	t.Helper()
	return p.callWithFault(t, "ADD", f)
}

// callWithFault is addWithFault for any verb.
func (p *pod) callWithFault(t *testing.T, verb string, f fault) (call *testenv.Call, stopped bool) {
	t.Helper()
	if f.Deadline == 0 {
		f.Deadline = testenv.Timeout
	}
	ctx, cancel := context.WithTimeout(t.Context(), f.Deadline+testenv.Timeout)
	defer cancel()
	env := p.env(verb)
	env[faultEnv] = string(encode(t, f))
	call, err := p.host.Node.Invoke(ctx, "/proc/self/exe", env, p.stdin(t))
	if ctx.Err() != nil {
		return nil, true
	}
	testenv.Must(t, err)
	return call, false
}

// stepNames returns the steps that a call of addWithFault has begun.
func stepNames(call *testenv.Call) []string {
	return strings.Split(string(bytes.TrimSpace(call.Stderr)), "\n")
}

// addPaused starts an ADD that pauses before a step until the returned lock is released.
func (p *pod) addPaused(t *testing.T, step string) (pause *flock.Lock, added <-chan *testenv.Call) {
	t.Helper()
	pause, err := flock.Acquire(testenv.Context(t), pauseLock, flock.Exclusive)
	testenv.Must(t, err)
	calls := make(chan *testenv.Call, 1)
	go func() {
		call, _ := p.addWithFault(t, fault{PauseBefore: step})
		calls <- call
	}()
	return pause, calls
}

func isDistinct(names []string) bool {
	return len(slices.Compact(slices.Sorted(slices.Values(names)))) == len(names)
}

// mutatingCalls are the system calls with which ADD, DEL and GC change something.
var mutatingCalls = []string{"bpf", "sendto", "sendmsg", "openat", "write", "linkat", "symlinkat", "renameat", "unlinkat", "unlink", "mkdirat", "utimensat", "setxattr", "fsetxattr", "flock", "close"}

// killPluginAt has the plugin killed when one of its threads enters a system call for the nth time.
func (h *host) killPluginAt(t *testing.T, call string, n int) {
	t.Helper()
	h.wrapPlugin(t, killAt(call, n))
}

// killAt returns a shell command for [wrapped].
func killAt(call string, n int) string {
	return fmt.Sprintf(`exec strace -f -qq -o /dev/null -e trace=%s -e inject=%s:signal=KILL:when=%d "$1"`, call, call, n)
}

// killStep returns the distance of the system calls at which to kill: without -long, of many alike some do.
func killStep() int {
	if *long {
		return 1
	}
	return 3
}

// killed reports whether the exit code, a plugin's or a shell's, means SIGKILL.
func killed(exit int) bool { return exit == -1 || exit == 137 }

// TestKilled kills ADD, DEL and GC at system calls that change something. DEL, or ADD and DEL, then removes all
// traces, and another container is never affected.
func TestKilled(t *testing.T) {
	h := newHost(t)
	conf := withPort(with(with(dual("1.1.0"), "nonMasqueradeCIDRs", list{"10.0.0.0/8"}), "runtimeConfig.aliases", list{"web"}), 8080)
	other := h.pod(t, "other", with(dual("1.1.0"), "nonMasqueradeCIDRs", list{"10.0.0.0/8"}))
	other.add(t)
	p := h.pod(t, "c1", conf)
	p.add(t)
	p.del(t)
	before := h.snapshot(t, p.Namespace, other.Namespace)

	for _, verb := range []string{"ADD", "DEL", "GC"} {
		all := 0
		for _, call := range mutatingCalls {
			kills := 0
			for n := 1; ; n += killStep() {
				if verb != "ADD" {
					p.add(t)
				}
				survived := false
				t.Run(fmt.Sprintf("%s, %s %d", verb, call, n), func(t *testing.T) {
					h.killPluginAt(t, call, n)
					if verb == "GC" {
						survived = !killed(h.tryGC(t, withKey(dual("1.1.0"), currentKey, attachments("other"))).Exit)
					} else {
						survived = !killed(p.try(t, verb).Exit)
					}
				})
				if verb == "ADD" && kills%2 == 1 && !survived { // the runtime retries, with the same or a new container
					if retry := p.try(t, "ADD"); retry.Exit != 0 {
						p.del(t)
						p.add(t)
					}
				}
				p.del(t)
				h.waitUnchanged(t, before, p.Namespace, other.Namespace)
				if survived || t.Failed() {
					break
				}
				kills++
			}
			t.Logf("%s was killed at %d calls of %s", verb, kills, call)
			all += kills
		}
		if all == 0 {
			t.Errorf("%s was killed at no call", verb)
		}
	}
	wantSuccess(t, other.try(t, "CHECK"), "")
}
