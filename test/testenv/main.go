package testenv

import (
	"errors"
	"fmt"
	"os"
	"time"
)

// leakGrace is how long leftovers may take to disappear: the kernel removes namespaces in the
// background.
const leakGrace = Timeout

// Main is a package's TestMain: it isolates the test binary with [Isolate], runs the tests, and
// fails the run if they leave links, network namespaces, pins, processes, or descriptors of
// BPF objects or namespaces behind.
func Main(m Runner) {
	Isolate()
	os.Exit(run(m, leakGrace))
}

// Runner is a [testing.M] or a wrapper around it.
type Runner interface{ Run() int }

func run(m Runner, grace time.Duration) int {
	before, err := takeSnapshot()
	if err != nil {
		fatal(err)
	}
	code := m.Run()
	if err := removeRecycled(); err != nil {
		fatal(err)
	}

	ctx, cancel := timeoutContext(grace)
	defer cancel()
	err = Wait(ctx, "leftovers of tests to disappear", func() error {
		after, err := takeSnapshot()
		if err != nil {
			return err
		}
		var leaks []error
		for _, thing := range after.minus(before) {
			leaks = append(leaks, errors.New("leaked "+thing))
		}
		return errors.Join(leaks...)
	})
	if err != nil {
		fmt.Fprintf(os.Stderr, "FAIL: testenv: %v\n", err)
		return max(code, 1)
	}
	return code
}
