package testenv

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"
)

// TB is the part of [testing.TB] that this package uses; [Machine] implements it for programs that
// are not tests. Fatalf must not return. Cleanup functions must run in reverse order.
type TB interface {
	Helper()
	Cleanup(func())
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
	TempDir() string
}

// Must ends a test that cannot go on after an error.
func Must(tb TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatalf("%v", err)
	}
}

// NoError fails a test that can go on after an error.
func NoError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Error(err)
	}
}

// ReadFile returns the content of a file that must exist.
func ReadFile(tb TB, path string) []byte {
	tb.Helper()
	content, err := os.ReadFile(path)
	Must(tb, err)
	return content
}

const (
	// Timeout limits the operations of this package without a context, and should limit
	// those of tests. It is long enough for an emulated CPU under load, which takes a minute to verify the programs:
	// reaching it means a fault.
	Timeout = 3 * time.Minute

	pollInterval = 10 * time.Millisecond
)

func timeoutContext(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// Context returns a context that ends after [Timeout] or with the test.
func Context(tb TB) context.Context {
	ctx, cancel := timeoutContext(Timeout)
	tb.Cleanup(cancel)
	return ctx
}

// Wait calls cond at once and then at short intervals, until it returns nil or ctx ends. The error
// names what and wraps the last error of cond.
func Wait(ctx context.Context, what string, cond func() error) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		err := cond()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w: %w", what, context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// Eventually fails the test if cond does not return nil within [Timeout].
func Eventually(tb TB, what string, cond func() error) {
	tb.Helper()
	ctx, cancel := timeoutContext(Timeout)
	defer cancel()
	if err := Wait(ctx, what, cond); err != nil {
		tb.Fatalf("%v", err)
	}
}

func requireIsolated(tb TB) {
	tb.Helper()
	if !isolated {
		tb.Fatalf("testenv: not isolated: call testenv.Main from TestMain, or testenv.Isolate")
	}
}
