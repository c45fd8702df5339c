package conformance

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestFailedAdd makes ADD fail before each of its steps, and in the last, when all others have to be undone.
func TestFailedAdd(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.snapshot(t, p.Namespace)

	for _, step := range learnAddSteps(t, p) {
		t.Run("before "+step, func(t *testing.T) { failAndRetry(t, p, before, fault{FailBefore: step}) })
	}
	t.Run("print the result", func(t *testing.T) { failAndRetry(t, p, before, fault{FailPrint: true}) })
}

// learnAddSteps returns the names of the steps of a successful ADD.
func learnAddSteps(t *testing.T, p *pod) []string {
	t.Helper()
	const fewest = 8 // fewer would mean that the steps were not logged

	call, stopped := p.addWithFault(t, fault{})
	if stopped || call.Exit != 0 {
		t.Fatalf("ADD: got %+v, want success", call)
	}
	p.del(t)
	steps := stepNames(call)
	if len(steps) < fewest || !isDistinct(steps) {
		t.Fatalf("steps of ADD: got %q, want at least %d distinct ones", steps, fewest)
	}
	return steps
}

// failAndRetry wants a failed ADD to leave nothing, and the next ADD to work.
func failAndRetry(t *testing.T, p *pod, before testenv.Snapshot, f fault) {
	t.Helper()
	call, stopped := p.addWithFault(t, f)
	if stopped {
		t.Fatal("ADD did not end in time")
	}
	if call.Exit == 0 || !strings.Contains(string(call.Stdout), errInjected.Error()) {
		t.Errorf("ADD: got exit code %d, %s; want error %q", call.Exit, call.Stdout, errInjected)
	}
	p.host.wantUnchanged(t, before, p.Namespace)
	p.add(t)
	p.del(t)
	p.host.wantUnchanged(t, before, p.Namespace)
}

// TestFailedWithinStep makes ADD fail in the middle of a step.
func TestFailedWithinStep(t *testing.T) {
	h := newHost(t)
	holder := h.pod(t, "holder", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	holder.add(t)

	ports := list{object{"hostPort": 7070, "containerPort": 80}, webPort[0]}
	overlapping := list{object{"dst": "10.0.0.0/8"}, object{"dst": "10.0.0.0/8"}}
	for name, conf := range map[string]object{
		"second port in use":  with(dual("1.0.0"), "runtimeConfig.portMappings", ports),
		"no second address":   with(dual("1.0.0"), "ipam.ranges", list{list{object{"subnet": "10.77.0.0/24"}}, list{object{"subnet": "fd00:77::/126", "rangeStart": "fd00:77::1", "rangeEnd": "fd00:77::1"}}}),
		"same route twice":    with(dual("1.0.0"), "ipam.routes", overlapping),
		"unreachable gateway": with(dual("1.0.0"), "ipam.routes", list{object{"dst": "0.0.0.0/0", "gw": "203.0.113.7"}}),
		"missing resolvConf":  with(dual("1.0.0"), "ipam.resolvConf", "/run/absent"),
	} {
		t.Run(name, func(t *testing.T) {
			p := h.pod(t, "c1", conf)
			before := h.snapshot(t, p.Namespace, holder.Namespace)
			if call := p.try(t, "ADD"); call.Exit == 0 {
				t.Errorf("ADD: got success (%s), want an error", call.Stdout)
			}
			h.wantUnchanged(t, before, p.Namespace, holder.Namespace)
			p.conf = dual("1.0.0")
			p.add(t)
		})
	}
}

// command returns a call of the plugin that has not begun.
func (p *pod) command(t *testing.T, verb string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), p.host.plugin)
	cmd.Env = []string{}
	for name, value := range p.env(verb) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Stdin = bytes.NewReader(p.stdin(t))
	return cmd
}

// TestAddForDeadRuntime calls ADD with pipes that nobody reads any more, as of a runtime that has died. ADD must undo
// its work where it cannot print the result, also if it could not write its log before.
func TestAddForDeadRuntime(t *testing.T) {
	h := newLoadedHost(t)
	p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", webPort))
	before := h.snapshot(t, p.Namespace)
	read, write, err := os.Pipe()
	testenv.Must(t, err)
	defer write.Close()
	read.Close()
	for _, level := range []string{"error", "debug"} {
		t.Run(level, func(t *testing.T) {
			p.conf = with(p.conf, "logLevel", level)
			cmd := p.command(t, "ADD")
			cmd.Stdout, cmd.Stderr = write, write
			testenv.Must(t, h.Node.Do(cmd.Start))
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("ADD: got %v, want exit code 1", err)
			}
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestTerminatedAdd ends an ADD that waits for a lock by a signal. It must undo its work.
func TestTerminatedAdd(t *testing.T) {
	h := newLoadedHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	before := h.snapshot(t, p.Namespace)
	for _, signal := range []unix.Signal{unix.SIGINT, unix.SIGTERM} {
		t.Run(signal.String(), func(t *testing.T) {
			lock, err := flock.Acquire(testenv.Context(t), loader.Root, flock.Exclusive)
			testenv.Must(t, err)
			defer lock.Release()
			cmd := p.command(t, "ADD")
			testenv.Must(t, h.Node.Do(cmd.Start))
			testenv.Eventually(t, "ADD to wait for the lock", func() error { // it creates the device before
				_, err := p.Netlink().LinkByName("eth0")
				return err
			})
			testenv.Must(t, cmd.Process.Signal(signal))
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("ADD: got %v, want exit code 1", err)
			}
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestAddWhileUnloaded unloads the datapath during an ADD, and has another ADD load it again. The first one must not write
// into the former maps: it fails, leaves nothing, and works once more.
func TestAddWhileUnloaded(t *testing.T) {
	h := newLoadedHost(t)
	p, other := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.aliases", list{"web"})), h.pod(t, "c2", dual("1.1.0"))
	pause, adding := p.addPaused(t, "write the endpoints and attach")
	testenv.Eventually(t, "the record", func() error {
		records, err := filepath.Glob(filepath.Join(record.DefaultDir, "netns-*", "*.json"))
		if err == nil && len(records) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	other.add(t)
	before := h.snapshot(t, other.Namespace)
	testenv.Must(t, pause.Release())
	call := <-adding
	call.Stderr = nil // the steps
	wantError(t, call, types.ErrTryAgainLater, "unloaded meanwhile")
	added, _ := before.Compare(h.snapshot(t, other.Namespace))
	if len(added) > 0 {
		t.Errorf("left behind: %s", strings.Join(added, "\n"))
	}
	p.add(t)
	p.del(t)
	other.del(t)
}
