package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestAllocatorKilled kills ebpfnet-ipam at system calls that change something: while it reserves a free
// address, its own of an earlier boot, or another container's of an earlier boot, and while it releases. DEL
// then removes everything of the container, and all addresses but the running container's can be reserved once.
func TestAllocatorKilled(t *testing.T) {
	testenv.Require(t, testenv.FileMarks)
	path := testenv.Build(t, ownAllocator)
	a := newAllocators(t, "10.1.0.0/29")
	for _, test := range []struct {
		name, verb string
		earlier    map[string]string // reservations of an earlier boot, container by address
	}{
		{"free", "ADD", nil},
		{"own of an earlier boot", "ADD", map[string]string{"10.1.0.4": "c1"}},
		{"another's of an earlier boot", "ADD", map[string]string{"10.1.0.3": "c3", "10.1.0.4": "c4", "10.1.0.5": "c5", "10.1.0.6": "c6"}},
		{"release", "DEL", nil},
	} {
		all := 0
		for _, call := range []string{"openat", "write", "fsync", "fsetxattr", "setxattr", "linkat", "symlinkat", "renameat", "unlinkat", "mkdirat", "utimensat", "flock"} {
			kills := 0
			for n := 1; ; n += killStep() {
				a.restart(t, path, test.earlier)
				if test.verb == "DEL" {
					a.mustCall(t, path, "ADD", "c1")
				}
				result, err := a.call(testenv.Context(t), wrapped(t, path, killAt(call, n)), test.verb, "c1")
				testenv.Must(t, err)
				a.mustCall(t, path, "DEL", "c1")
				a.wantAllAddresses(t, path)
				if t.Failed() {
					t.Fatalf("%s: after SIGKILL at call %d of %s", test.name, n, call)
				}
				if !killed(result.Exit) {
					break
				}
				kills++
			}
			t.Logf("%s: killed at %d calls of %s", test.name, kills, call)
			all += kills
		}
		if all == 0 {
			t.Errorf("%s: killed at no call", test.name)
		}
	}
}

// restart starts over with a running container and reservations of an earlier boot.
func (a *allocators) restart(t *testing.T, path string, earlier map[string]string) {
	t.Helper()
	testenv.Must(t, os.RemoveAll(a.dir))
	a.mustCall(t, path, "ADD", "running")
	for addr, id := range earlier {
		file := filepath.Join(a.dir, addr)
		testenv.Must(t, os.WriteFile(file, []byte(id+"\r\neth0"), 0o600))
		testenv.Must(t, unix.Setxattr(file, "user.ebpfnet.boot", []byte("earlier"), 0))
	}
}

// wantAllAddresses reserves all addresses that no running container has.
func (a *allocators) wantAllAddresses(t *testing.T, path string) {
	t.Helper()
	var reserved []netip.Addr
	for {
		call, err := a.call(testenv.Context(t), path, "ADD", fmt.Sprintf("next%d", len(reserved)))
		testenv.Must(t, err)
		if call.Exit != 0 {
			wantError(t, call, cnierr.CodeAddressesExhausted)
			break
		}
		reserved = append(reserved, addresses(parseResult(t, call.Stdout))...)
	}
	slices.SortFunc(reserved, netip.Addr.Compare)
	if got, want := fmt.Sprint(reserved), "[10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6]"; got != want { // "running" has 10.1.0.2
		files, _ := filepath.Glob(filepath.Join(a.dir, "*"))
		t.Errorf("reserved addresses: got %s, want %s; files: %v", got, want, files)
	}
}
