package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// wrapped returns a program that runs a line of shell, with another program as $1.
func wrapped(t *testing.T, program, line string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "wrapped")
	script := fmt.Sprintf("#!/bin/sh\nset -e -- %s\n%s\n", program, line)
	testenv.Must(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}

// wrapPlugin replaces the plugin by a wrapped one until the end of the test.
func (h *host) wrapPlugin(t *testing.T, line string) {
	t.Helper()
	plugin := h.plugin
	h.plugin = wrapped(t, plugin, line)
	t.Cleanup(func() { h.plugin = plugin })
}

// newMemoryCgroup makes a cgroup with a memory limit, of the version that the host uses, and returns its list of
// processes.
func newMemoryCgroup(t *testing.T, limit int) (procs string) {
	t.Helper()
	root := t.TempDir()
	file := "memory.limit_in_bytes"
	if err := unix.Mount("memory", root, "cgroup", 0, "memory"); err != nil {
		file = "memory.max"
		testenv.Must(t, unix.Mount("none", root, "cgroup2", 0, ""))
		testenv.Must(t, os.WriteFile(filepath.Join(root, "cgroup.subtree_control"), []byte("+memory"), 0))
	}
	group := filepath.Join(root, fmt.Sprintf("ebpfnet-test-%d", os.Getpid()))
	testenv.Must(t, os.Mkdir(group, 0o755))
	t.Cleanup(func() {
		testenv.Eventually(t, "the cgroup to be empty", func() error { return os.Remove(group) })
		testenv.NoError(t, unix.Unmount(root, 0))
	})
	testenv.Must(t, os.WriteFile(filepath.Join(group, file), fmt.Append(nil, limit), 0))
	return filepath.Join(group, "cgroup.procs")
}

// TestSmallCgroup runs ADD in a cgroup without enough memory for the maps. The error says what to do: with fewer
// flows, ADD works.
func TestSmallCgroup(t *testing.T) {
	testenv.Require(t, testenv.MemoryGroups)
	const mebibyte = 1 << 20

	h := newLoadingHost(t)
	h.wrapPlugin(t, fmt.Sprintf(`echo $$ >%s; exec "$1"`, newMemoryCgroup(t, 256*mebibyte)))
	p := h.pod(t, "c1", with(dual("1.1.0"), "maxFlows", 4*mebibyte))
	h.wantSetupError(t, p, cnierr.CodeNotSupported, "memory", "maxFlows", "cgroup")
	p = h.pod(t, "c2", with(dual("1.1.0"), "maxFlows", 2048))
	p.add(t)
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	p.del(t)
}

// TestBPFForbidden makes all bpf calls fail, as lockdown or a seccomp filter does.
func TestBPFForbidden(t *testing.T) {
	h := newLoadingHost(t)
	h.wrapPlugin(t, `exec strace -f -qq -o /dev/null -e trace=bpf -e inject=bpf:error=EPERM "$1"`)
	h.wantSetupError(t, h.pod(t, "c1", dual("1.1.0")), cnierr.CodeNotSupported, "operation not permitted", "lockdown")
}
