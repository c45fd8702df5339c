package conformance

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// patience is how long ADD may wait for locks in these tests.
const patience = 300 * time.Millisecond

// TestBusy holds each lock that ADD takes for longer than ADD may wait. It must say "try
// again", in time, and leave nothing.
func TestBusy(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.state(t, p.Namespace)
	p.add(t)
	p.del(t) // all lock files are there now

	for name, path := range map[string]string{
		"datapath":  loader.Root,
		"addresses": filepath.Join(addressDir, "pods", "lock"),
		"GC":        record.DefaultDir,
	} {
		t.Run(name, func(t *testing.T) {
			lock, err := flock.Acquire(testenv.Context(t), path, flock.Exclusive)
			if err != nil {
				t.Fatal(err)
			}
			call, stopped := p.addAs(t, role{Deadline: patience})
			lock.Release()
			if stopped {
				t.Errorf("ADD does not end after its deadline of %s", patience)
			} else {
				call.Stderr = nil // the steps
				wantError(t, call, codeTryAgain, "lock", path)
				h.wantState(t, before, p.Namespace)
			}
			p.del(t)
			p.add(t)
			p.del(t)
			h.wantState(t, before, p.Namespace)
		})
	}
}

// TestBusyVerbs is the same for the other verbs: CHECK must not take what it cannot look at for a
// difference, which has its container made anew.
func TestBusyVerbs(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	before := h.state(t, p.Namespace)
	addresses := filepath.Join(addressDir, "pods", "lock")
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
			if err != nil {
				t.Fatal(err)
			}
			call, stopped := p.doAs(t, test.verb, role{Deadline: patience})
			lock.Release()
			if stopped {
				t.Fatalf("%s does not end after its deadline of %s", test.verb, patience)
			}
			wantError(t, call, test.code, "lock", test.lock)
			if test.verb != "DEL" { // which has done what it could
				h.wantState(t, before, p.Namespace)
			}
		})
	}
	p.del(t)
}

// TestBusyInTheMiddle takes the datapath's lock away from an ADD that has its device already: the
// undo cannot have the lock either. What it leaves must be no more than a DEL takes away.
func TestBusyInTheMiddle(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.state(t, p.Namespace)
	p.add(t)
	p.del(t)
	call, stopped := p.addAs(t, role{LockBefore: "open the host ports", Deadline: patience})
	if stopped {
		t.Errorf("ADD does not end after its deadline of %s", patience)
	} else if call.Exit == 0 {
		t.Error("ADD succeeded")
	}
	p.del(t)
	h.wantState(t, before, p.Namespace)
}

// TestWaiting lets go of the lock while the plugin waits for it.
func TestWaiting(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	p.add(t)
	p.del(t)
	lock, err := flock.Acquire(testenv.Context(t), loader.Root, flock.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan *testenv.Call, 1)
	go func() { done <- p.try(t, "ADD") }()
	// The device is there while the entries are waited for.
	testenv.Eventually(t, "ADD to wait for the lock", func() error {
		_, err := p.Netlink().LinkByName("eth0")
		return err
	})
	lock.Release()
	wantSuccess(t, <-done, anything)
}
