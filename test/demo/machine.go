package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// machine lets testenv be used outside of a test.
type machine struct {
	failure  error
	cleanups []func()
}

var _ testenv.TB = (*machine)(nil)

// Helper does nothing: there are no lines of tests to name.
func (m *machine) Helper() {}

// Cleanup registers fn to run at the end, after those registered later.
func (m *machine) Cleanup(fn func()) { m.cleanups = append(m.cleanups, fn) }

// Fatalf ends the function that protect runs. It does not return.
func (m *machine) Fatalf(format string, args ...any) {
	m.failure = fmt.Errorf(format, args...)
	runtime.Goexit()
}

// Logf tells what is no reason to stop.
func (m *machine) Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "demo: "+format+"\n", args...)
}

// TempDir returns a new directory, in the /run that goes with this process.
func (m *machine) TempDir() string {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		m.Fatalf("make a temporary directory: %v", err)
	}
	return dir
}

// protect runs fn and returns its error, or that of a Fatalf in it. Calls nest.
func (m *machine) protect(fn func() error) (err error) {
	done := make(chan struct{})
	err = errors.New("ended without a result") // replaced unless something exits the goroutine
	go func() {
		defer close(done)
		err = fn()
	}()
	<-done
	if m.failure != nil {
		err, m.failure = m.failure, nil
	}
	return err
}

// cleanUp runs what Cleanup registered, the last first, whatever fails meanwhile.
func (m *machine) cleanUp() error {
	var errs []error
	for len(m.cleanups) > 0 {
		last := len(m.cleanups) - 1
		fn := m.cleanups[last]
		m.cleanups = slices.Delete(m.cleanups, last, last+1)
		errs = append(errs, m.protect(func() error { fn(); return nil }))
	}
	return errors.Join(errs...)
}
