package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// Machine is the [TB] of a program that is not a test. It is for one goroutine at a time.
type Machine struct {
	// Name is the program's.
	Name string

	failure  error
	cleanups []func()
}

var _ TB = (*Machine)(nil)

// Helper does nothing: there are no lines of tests to name.
func (m *Machine) Helper() {}

// Cleanup registers fn to run at the end, after those registered later.
func (m *Machine) Cleanup(fn func()) { m.cleanups = append(m.cleanups, fn) }

// Fatalf ends the function that Protect runs. It does not return.
func (m *Machine) Fatalf(format string, args ...any) {
	m.failure = fmt.Errorf(format, args...)
	runtime.Goexit()
}

// Logf tells what is no reason to stop.
func (m *Machine) Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, m.Name+": "+format+"\n", args...)
}

// TempDir returns a new directory, in the /run that goes with this process.
func (m *Machine) TempDir() string {
	dir, err := os.MkdirTemp("", m.Name+"-")
	if err != nil {
		m.Fatalf("make a temporary directory: %v", err)
	}
	return dir
}

// Protect runs fn and returns its error, or that of a Fatalf in it. Calls nest.
func (m *Machine) Protect(fn func() error) (err error) {
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

// CleanUp runs what Cleanup registered, the last first, whatever fails meanwhile.
func (m *Machine) CleanUp() error {
	var errs []error
	for len(m.cleanups) > 0 {
		last := len(m.cleanups) - 1
		fn := m.cleanups[last]
		m.cleanups = slices.Delete(m.cleanups, last, last+1)
		errs = append(errs, m.Protect(func() error { fn(); return nil }))
	}
	return errors.Join(errs...)
}

// ExitOnSignal ends the process when it is told to. There is nothing to clean up: this is the first
// process of its PID namespace, and everything goes with it.
func (m *Machine) ExitOnSignal() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	go func() {
		sig := (<-signals).(unix.Signal)
		if sig != unix.SIGPIPE { // nobody reads any more
			fmt.Fprintf(os.Stderr, "\n%s: %v: what was set up goes with this process, nothing is left\n", m.Name, sig)
		}
		os.Exit(128 + int(sig))
	}()
}
