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

// Machine is the [TB] of a program that is not a test. It is not safe for concurrent use.
type Machine struct {
	// Name is the name of the program.
	Name string

	failure  error
	cleanups []func()
}

var _ TB = (*Machine)(nil)

// Helper does nothing, because a program reports no line numbers.
func (m *Machine) Helper() {}

// Cleanup registers fn to run at the end, after those registered later.
func (m *Machine) Cleanup(fn func()) { m.cleanups = append(m.cleanups, fn) }

// Fatalf ends the function that Protect runs. It does not return.
func (m *Machine) Fatalf(format string, args ...any) {
	m.failure = fmt.Errorf(format, args...)
	runtime.Goexit()
}

// Logf prints a warning.
func (m *Machine) Logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, m.Name+": "+format+"\n", args...)
}

// TempDir returns a new directory, in the /run that disappears with this process.
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
	err = errors.New("the goroutine ended early") // replaced unless something exits the goroutine
	go func() {
		defer func() {
			if reason := recover(); reason != nil {
				panic(reason) // while the caller waits: it would exit before all is printed
			}
			close(done)
		}()
		err = fn()
	}()
	<-done
	if m.failure != nil {
		err, m.failure = m.failure, nil
	}
	return err
}

// CleanUp runs the functions that Cleanup registered, the last one first, even if some fail.
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

// ExitOnSignal ends the process on a signal, without cleanup: this is the first process of its PID
// namespace, and the kernel removes everything with it.
func (m *Machine) ExitOnSignal() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	go func() {
		sig := (<-signals).(unix.Signal)
		if sig != unix.SIGPIPE { // otherwise nobody reads
			fmt.Fprintf(os.Stderr, "\n%s: %v: the kernel removes everything with this process\n", m.Name, sig)
		}
		os.Exit(128 + int(sig))
	}()
}
