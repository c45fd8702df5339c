package conformance

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

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
	if err != nil {
		t.Fatal(err)
	}
	defer write.Close()
	read.Close()
	for _, level := range []string{"error", "debug"} {
		t.Run(level, func(t *testing.T) {
			p.conf = with(p.conf, "logLevel", level)
			cmd := p.command(t, "ADD")
			cmd.Stdout, cmd.Stderr = write, write
			if err := h.Node.Do(cmd.Start); err != nil {
				t.Fatal(err)
			}
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
			if err != nil {
				t.Fatal(err)
			}
			defer lock.Release()
			cmd := p.command(t, "ADD")
			if err := h.Node.Do(cmd.Start); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, "ADD to wait for the lock", func() error { // it creates the device before
				_, err := p.Netlink().LinkByName("eth0")
				return err
			})
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("ADD: got %v, want exit code 1", err)
			}
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}
