package flock

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestModes(t *testing.T) {
	tests := []struct {
		name          string
		first, second Mode
		busy          bool
	}{
		{"shared then shared", Shared, Shared, false},
		{"shared then exclusive", Shared, Exclusive, true},
		{"exclusive then shared", Exclusive, Shared, true},
		{"exclusive then exclusive", Exclusive, Exclusive, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lock")
			first := mustAcquire(t, path, tt.first)

			second, err := Acquire(soon(t), path, tt.second)
			if !tt.busy {
				if err != nil {
					t.Fatalf("second lock: %v", err)
				}
				mustRelease(t, second)
				return
			}
			if !errors.Is(err, ErrBusy) || !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("second lock: got %v, want ErrBusy and the deadline", err)
			}
			if !strings.Contains(err.Error(), path) {
				t.Errorf("error %q does not name %s", err, path)
			}

			mustRelease(t, first)
			mustRelease(t, mustAcquire(t, path, tt.second))
		})
	}
}

func TestAcquireCreatesFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	mustRelease(t, mustAcquire(t, path, Exclusive))

	info, err := os.Stat(path)
	if err != nil {
		t.Fatalf("the lock file must outlive the lock: %v", err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("mode is %v, want 0600", info.Mode())
	}
}

func TestAcquireDirectory(t *testing.T) {
	dir := t.TempDir()
	defer mustRelease(t, mustAcquire(t, dir, Exclusive))

	if _, err := Acquire(soon(t), dir, Shared); !errors.Is(err, ErrBusy) {
		t.Errorf("got %v, want ErrBusy", err)
	}
}

func TestAcquireErrors(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing", "lock")
	if _, err := Acquire(soon(t), missing, Shared); !errors.Is(err, fs.ErrNotExist) || errors.Is(err, ErrBusy) {
		t.Errorf("missing parent: got %v, want fs.ErrNotExist alone", err)
	}
}

func TestAcquireEndedContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()

	lock, err := Acquire(ctx, path, Exclusive)
	if err != nil {
		t.Fatalf("a free lock must be acquired at once: %v", err)
	}
	defer mustRelease(t, lock)
	if _, err := Acquire(ctx, path, Exclusive); !errors.Is(err, ErrBusy) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want ErrBusy and context.Canceled", err)
	}
}

func TestAcquireWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first := mustAcquire(t, path, Exclusive)

	acquired := make(chan *Lock)
	go func() {
		lock, err := Acquire(t.Context(), path, Exclusive)
		if err != nil {
			t.Error(err)
		}
		acquired <- lock
	}()
	select {
	case <-acquired:
		t.Fatal("acquired a held lock")
	case <-time.After(20 * time.Millisecond):
	}
	mustRelease(t, first)
	mustRelease(t, <-acquired)
}

// A lock on a file that the path no longer names protects nothing.
func TestLockNamedRefusesReplacedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	tests := []struct {
		name    string
		replace func() error
	}{
		{"removed", func() error { return os.Remove(path) }},
		{"replaced", func() error { return errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600)) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			file, err := open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(file)
			// The new file must not get the old one's inode number.
			if err := tt.replace(); err != nil {
				t.Fatal(err)
			}
			if err := lockNamed(file, path, Exclusive); !errors.Is(err, errAgain) {
				t.Errorf("got %v, want errAgain", err)
			}
		})
	}
}

func TestLockIsNotInherited(t *testing.T) {
	lock := mustAcquire(t, filepath.Join(t.TempDir(), "lock"), Exclusive)
	defer mustRelease(t, lock)

	flags, err := unix.FcntlInt(uintptr(lock.fd), unix.F_GETFD, 0)
	if err != nil {
		t.Fatal(err)
	}
	if flags&unix.FD_CLOEXEC == 0 {
		t.Error("the lock's descriptor would survive exec")
	}
}

// A child that shares the file description must not prolong the lock.
func TestReleaseUnlocksDuplicates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	lock := mustAcquire(t, path, Exclusive)
	duplicate, err := unix.Dup(lock.fd)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(duplicate)

	mustRelease(t, lock)
	mustRelease(t, mustAcquire(t, path, Exclusive))
}

func TestReleaseTwice(t *testing.T) {
	var none *Lock
	mustRelease(t, none)

	path := filepath.Join(t.TempDir(), "lock")
	lock := mustAcquire(t, path, Exclusive)
	mustRelease(t, lock)
	other := mustAcquire(t, path, Exclusive)
	mustRelease(t, lock)
	if _, err := Acquire(soon(t), path, Exclusive); !errors.Is(err, ErrBusy) {
		t.Errorf("a second Release released another lock: got %v, want ErrBusy", err)
	}
	mustRelease(t, other)
}

func mustAcquire(t *testing.T, path string, how Mode) *Lock {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lock, err := Acquire(ctx, path, how)
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

func mustRelease(t *testing.T, lock *Lock) {
	t.Helper()
	if err := lock.Release(); err != nil {
		t.Fatalf("release: %v", err)
	}
}

// soon is a deadline long enough for a free lock and short enough for a held one.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}
