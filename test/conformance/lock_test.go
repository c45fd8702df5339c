package conformance

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// patience is the deadline of calls that wait for a lock.
const patience = 300 * time.Millisecond

// untilLock calls a verb with a deadline, which is longer each time, until it comes as far as to name the lock. It
// must end after each deadline.
func (p *pod) untilLock(t *testing.T, verb, lock string) *testenv.Call {
	t.Helper()
	for deadline := patience; ; deadline *= 2 {
		call, stopped := p.callWithFault(t, verb, fault{Deadline: deadline})
		if stopped {
			t.Fatalf("%s did not end after its deadline of %s", verb, deadline)
		}
		if call.Stderr = nil; call.Exit == 0 || strings.Contains(string(call.Stdout), lock) || deadline > testenv.Timeout { // had the steps
			return call
		}
	}
}

// TestAddLockTimeout holds each lock that ADD takes. ADD must fail with "try again" at its deadline, and leave
// nothing.
func TestAddLockTimeout(t *testing.T) {
	h := newLoadedHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.snapshot(t, p.Namespace)
	for name, path := range map[string]string{
		"datapath":  loader.Root,
		"addresses": filepath.Join(testenv.ReservationDir, "pods", "lock"),
		"GC":        record.DefaultDir,
	} {
		t.Run(name, func(t *testing.T) {
			lock, err := flock.Acquire(testenv.Context(t), path, flock.Exclusive)
			testenv.Must(t, err)
			call := p.untilLock(t, "ADD", path)
			lock.Release()
			wantError(t, call, codeTryAgain, "lock", path)
			h.wantUnchanged(t, before, p.Namespace)
			p.del(t)
			p.add(t)
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestLockTimeout is the same for the other verbs. CHECK must not report a timeout as a difference, since the runtime
// would recreate the container.
func TestLockTimeout(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	before := h.snapshot(t, p.Namespace)
	addresses := filepath.Join(testenv.ReservationDir, "pods", "lock")
	for _, test := range []struct {
		verb, lock string
		code       uint
	}{
		{"CHECK", addresses, codeTryAgain},
		{"STATUS", addresses, codeNotAvailable},
		{"GC", addresses, codeTryAgain},
		{"GC", record.DefaultDir, codeTryAgain},
		{"DEL", addresses, codeTryAgain},
	} {
		t.Run(test.verb+" "+test.lock, func(t *testing.T) {
			lock, err := flock.Acquire(testenv.Context(t), test.lock, flock.Exclusive)
			testenv.Must(t, err)
			call := p.untilLock(t, test.verb, test.lock)
			lock.Release()
			wantError(t, call, test.code, "lock", test.lock)
			if test.verb != "DEL" { // which removes what it can
				h.wantUnchanged(t, before, p.Namespace)
			}
		})
	}
	p.del(t)
}

// TestStatusLockTimeout holds the datapath's lock while STATUS has an uplink to repair. As with the other locks an ADD
// would fail; that STATUS had to wait does not mean that it could not repair.
func TestStatusLockTimeout(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	removePin("uplink-*-to_uplink")(t, p, nil)
	lock, err := flock.Acquire(testenv.Context(t), loader.Root, flock.Exclusive)
	testenv.Must(t, err)
	call := p.untilLock(t, "STATUS", loader.Root)
	lock.Release()
	wantError(t, call, codeNotAvailable, "lock", loader.Root)
	wantSuccess(t, h.status(t, p.conf), "")
	wantSuccess(t, p.try(t, "CHECK"), "")
}

// TestLockTimeoutDuringUndo takes the datapath's lock after ADD has created its device, so that its undo cannot take
// the lock either. DEL must remove what ADD leaves.
func TestLockTimeoutDuringUndo(t *testing.T) {
	h := newLoadedHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.snapshot(t, p.Namespace)
	const step = "open the host ports"
	for deadline := patience; ; deadline *= 2 {
		call, stopped := p.addWithFault(t, fault{LockBefore: step, Deadline: deadline})
		if stopped {
			t.Fatalf("ADD did not end after its deadline of %s", deadline)
		}
		isReached := slices.Contains(stepNames(call), step)
		if call.Stderr = nil; isReached { // had the steps
			wantError(t, call, codeTryAgain, "lock", loader.Root)
		}
		p.del(t)
		h.wantUnchanged(t, before, p.Namespace)
		if isReached {
			return
		}
		if deadline > testenv.Timeout {
			t.Fatalf("ADD does not come to %q: %s", step, call.Stdout)
		}
	}
}

// TestAddWaitsForLock releases a lock while ADD waits for it.
func TestAddWaitsForLock(t *testing.T) {
	h := newLoadedHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	lock, err := flock.Acquire(testenv.Context(t), loader.Root, flock.Exclusive)
	testenv.Must(t, err)
	done := make(chan *testenv.Call, 1)
	go func() { done <- p.try(t, "ADD") }()
	// ADD creates the device before it needs the lock.
	testenv.Eventually(t, "ADD to wait for the lock", func() error {
		_, err := p.Netlink().LinkByName("eth0")
		return err
	})
	lock.Release()
	wantSuccess(t, <-done, anything)
}
