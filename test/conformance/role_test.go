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

// roleEnv makes the test binary play a plugin that fails as it says, instead of running
// its tests. A process of its own is what the plugin is written for: all of its threads are in
// the node's namespace.
const roleEnv = "CONFORMANCE_ROLE"

// role is how the plugin of [roleEnv] differs from the real one.
type role struct {
	FailBefore  string        // a step of ADD
	KillBefore  string        // a step: the process ends there by SIGKILL
	LockBefore  string        // a step: the datapath's lock is taken there, and kept
	PauseBefore string        // a step: it waits there until nobody holds pauseLock
	FailPrint   bool          // stdout takes nothing
	Deadline    time.Duration // for the whole verb
}

const pauseLock = "/run/pause"

var errOnPurpose = errors.New("on purpose")

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errOnPurpose }

// playPlugin runs a verb and writes each step of ADD to stderr, and the error to stdout.
func playPlugin() int {
	var r role
	stdin, err := io.ReadAll(os.Stdin)
	if err = errors.Join(err, json.Unmarshal([]byte(os.Getenv(roleEnv)), &r)); err != nil {
		panic(err)
	}
	in := &plugin.Plugin{Stdout: io.Discard, BeforeStep: r.beforeStep}
	if r.FailPrint {
		in.Stdout = fullDisk{}
	}
	verbs := cni.Funcs(in, r.Deadline)
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

func (r role) beforeStep(name string) error {
	fmt.Fprintln(os.Stderr, name)
	if name == r.LockBefore {
		_, err := flock.Acquire(context.Background(), loader.Root, flock.Exclusive) // ends with the process
		return err
	}
	if name == r.KillBefore {
		return unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	if name == r.PauseBefore {
		lock, err := flock.Acquire(context.Background(), pauseLock, flock.Exclusive)
		return errors.Join(err, lock.Release())
	}
	if name == r.FailBefore {
		return errOnPurpose
	}
	return nil
}

// addAs runs ADD as a role plays it. stopped says that it had to be killed.
func (p *pod) addAs(t *testing.T, r role) (call *testenv.Call, stopped bool) {
	t.Helper()
	return p.doAs(t, "ADD", r)
}

// doAs is addAs for any verb.
func (p *pod) doAs(t *testing.T, verb string, r role) (call *testenv.Call, stopped bool) {
	t.Helper()
	if r.Deadline == 0 {
		r.Deadline = testenv.Timeout
	}
	ctx, cancel := context.WithTimeout(t.Context(), r.Deadline+testenv.Timeout)
	defer cancel()
	env := p.env(verb)
	env[roleEnv] = string(encode(t, r))
	conf := p.conf
	if p.result != nil {
		conf = with(conf, "prevResult", p.result)
	}
	call, err := p.host.Node.Invoke(ctx, "/proc/self/exe", env, encode(t, conf))
	if ctx.Err() != nil {
		return nil, true
	}
	if err != nil {
		t.Fatal(err)
	}
	return call, false
}

// stepsOf returns the steps that a role has taken, and wants no other words of it.
func stepsOf(call *testenv.Call) []string {
	return strings.Split(string(bytes.TrimSpace(call.Stderr)), "\n")
}

func isDistinct(names []string) bool {
	return len(slices.Compact(slices.Sorted(slices.Values(names)))) == len(names)
}
