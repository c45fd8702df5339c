package conformance

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// followed is what `ebpfnetctl drops --follow -o json` prints on a node.
type followed struct {
	host *host
	cmd  *exec.Cmd
	errs strings.Builder

	mu      sync.Mutex
	drops   []drops.Drop
	leftOut map[string]uint64
	seconds int             // in which something was left out
	lines   map[bool]string // one of each kind; true: of what was left out
	done    chan error
}

// follow starts to follow, and waits until the programs report.
func (h *host) follow(t *testing.T, args ...string) *followed {
	t.Helper()
	f := &followed{host: h, leftOut: map[string]uint64{}, lines: map[bool]string{}, done: make(chan error, 1)}
	f.cmd = exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), append([]string{"drops", "--follow", "-o", "json"}, args...)...)
	f.cmd.Stderr = &f.errs
	out, err := f.cmd.StdoutPipe()
	if err == nil {
		err = h.Node.Do(f.cmd.Start)
	}
	testenv.Must(t, err)
	t.Cleanup(func() { _ = f.cmd.Process.Kill() })
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			f.add(t, lines.Bytes())
		}
		f.done <- f.cmd.Wait()
	}()
	h.awaitDropReader(t, f.cmd, &f.errs)
	return f
}

func (f *followed) add(t *testing.T, line []byte) {
	var drop struct {
		drops.Drop
		LeftOut  uint64
		ByReason map[string]uint64
	}
	if err := json.Unmarshal(line, &drop); err != nil {
		t.Errorf("%v: %s", err, line)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lines[drop.LeftOut > 0] = string(line)
	if drop.LeftOut == 0 {
		f.drops = append(f.drops, drop.Drop)
	}
	for reason, n := range drop.ByReason {
		f.leftOut[reason] += n
		drop.LeftOut -= n
	}
	if len(drop.ByReason) > 0 {
		f.seconds++
	}
	if drop.LeftOut != 0 {
		t.Errorf("got another sum than leftOut: %s", line)
	}
}

// list returns what was printed so far.
func (f *followed) list() []drops.Drop {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.drops)
}

// floodedSeconds returns in how many seconds something was left out so far.
func (f *followed) floodedSeconds() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seconds
}

// want waits for a drop, and returns it.
func (f *followed) want(t *testing.T, what string, isIt func(drops.Drop) bool) (found drops.Drop) {
	t.Helper()
	testenv.Eventually(t, "a drop: "+what, func() error {
		all := f.list()
		i := slices.IndexFunc(all, isIt)
		if i < 0 {
			return fmt.Errorf("got %+v; %s", all, f.errs.String())
		}
		found = all[i]
		return nil
	})
	return found
}

// stop ends it as Ctrl-C does, and wants nothing left.
func (f *followed) stop(t *testing.T) {
	t.Helper()
	testenv.Must(t, f.cmd.Process.Signal(unix.SIGINT))
	if err := <-f.done; err != nil {
		t.Errorf("after Ctrl-C: got %v, want exit code 0: %s", err, f.errs.String())
	}
	for _, line := range f.lines {
		if err := (&script{T: t, host: f.host}).validate("drops", line); err != nil {
			t.Errorf("%v: %s", err, line)
		}
	}
	f.host.wantNoDropReader(t)
}

// followTo starts to follow, and waits until the programs report. The caller must wait for its end.
func (h *host) followTo(t *testing.T, out *os.File, format string) (cmd *exec.Cmd, stderr *strings.Builder) {
	t.Helper()
	stderr = &strings.Builder{}
	cmd = exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), "drops", "--follow", "-o", format)
	cmd.Stdout, cmd.Stderr = out, stderr
	testenv.Must(t, h.Node.Do(cmd.Start))
	h.awaitDropReader(t, cmd, stderr)
	return cmd, stderr
}

// awaitDropReader waits until the programs report to the command, or it has ended: a packet that a container sends by itself
// may be the first that it cannot write.
func (h *host) awaitDropReader(t *testing.T, cmd *exec.Cmd, stderr *strings.Builder) {
	t.Helper()
	testenv.Eventually(t, "the reader to enter itself", func() error {
		if status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid)); err != nil || strings.Contains(string(status), "\nState:\tZ") {
			return nil
		}
		if state := h.dropReader(t); state.Until == 0 || int(state.Pid) != cmd.Process.Pid {
			return fmt.Errorf("got %+v: %s", state, stderr)
		}
		return nil
	})
}

func (h *host) wantNoDropReader(t *testing.T) {
	t.Helper()
	if state := h.dropReader(t); state != (bpf.DropReader{}) {
		t.Errorf("got a reader %+v, want none", state)
	}
}

// dropReader reads which process follows drops.
func (h *host) dropReader(t *testing.T) (state bpf.DropReader) {
	t.Helper()
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		if err := datapath.OpenOnDemand(bpf.MapDropReader); err != nil {
			return err
		}
		return datapath.DropReader.Lookup(uint32(0), &state)
	})
	return state
}

// awaitForged waits until the datapath has dropped the given number of forged frames: the kernel may process a sent one later.
func (h *host) awaitForged(t *testing.T, frames uint64) {
	t.Helper()
	testenv.Eventually(t, "forged frames to be dropped", func() error {
		if got := h.dropTotals(t)["mac"]; got < frames {
			return fmt.Errorf("got %d, want %d", got, frames)
		}
		return nil
	})
}

// dropTotals counts what the datapath has dropped, by the reasons' names.
func (h *host) dropTotals(t *testing.T) map[string]uint64 {
	t.Helper()
	totals := map[string]uint64{}
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		counts, err := maps.DropTotals(datapath)
		for _, c := range counts {
			totals[c.Reason.Name()] = c.Packets
		}
		return err
	})
	return totals
}
