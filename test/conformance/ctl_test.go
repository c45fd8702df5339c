package conformance

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ctl runs ebpfnetctl on the node.
func (h *host) ctl(t *testing.T, args ...string) (exit int, stdout, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	testenv.Must(t, h.Node.Do(cmd.Start))
	_ = cmd.Wait() // the exit code is returned
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// wantCtl runs ebpfnetctl, and wants an exit code, and words on stdout or, for a failure, on stderr.
func (h *host) wantCtl(t *testing.T, exit int, args []string, words ...string) {
	t.Helper()
	got, stdout, stderr := h.ctl(t, args...)
	text := stdout
	if exit != 0 {
		text = stderr
	}
	if got != exit {
		t.Errorf("ebpfnetctl %q: got exit code %d, want %d: %s%s", args, got, exit, stdout, stderr)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("ebpfnetctl %q: got %q, want it to contain %q", args, text, word)
		}
	}
}
