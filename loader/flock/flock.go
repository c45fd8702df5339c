// Package flock takes advisory locks between processes with flock(2).
//
// A lock belongs to an open file description: it ends with Release or with its
// process, however that dies, so there is never anything to clean up. Two Acquire
// calls of one process exclude each other like those of two processes. Lock files
// are never deleted, because a lock on a deleted file excludes nobody.
package flock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Mode says which other locks a lock excludes.
type Mode int

const (
	// Shared excludes exclusive locks only: for readers.
	Shared Mode = unix.LOCK_SH
	// Exclusive excludes every other lock: for writers.
	Exclusive Mode = unix.LOCK_EX
)

// ErrBusy is wrapped by Acquire when the context ends while others hold the lock.
var ErrBusy = errors.New("lock is held by another process")

// The kernel has no flock with a deadline, so a waiter polls: fast at first, because
// locks here are held for milliseconds, then more slowly to spare the CPU.
const (
	firstPause = 500 * time.Microsecond
	lastPause  = 16 * time.Millisecond
)

// Lock is a held lock.
type Lock struct {
	file *os.File
}

// Acquire locks path, which is an existing directory, or a file that is created with
// mode 0600 if absent. It tries at least once, and until ctx ends. Then the error wraps
// ErrBusy and the cause of ctx's end; any other error comes from opening or locking
// path. The caller must call Release.
func Acquire(ctx context.Context, path string, mode Mode) (*Lock, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		file, err := try(path, mode)
		if err == nil {
			return &Lock{file: file}, nil
		}
		if !errors.Is(err, errAgain) {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if err := wait(ctx, pause); err != nil {
			return nil, fmt.Errorf("lock %s: %w: %w", path, ErrBusy, err)
		}
	}
}

// Release releases the lock. It ignores a nil or released Lock, and is not safe for
// concurrent use.
func (l *Lock) Release() error {
	if l == nil || l.file == nil {
		return nil
	}
	file := l.file
	l.file = nil

	// Closing the file is not enough: until its exec, a child process that another
	// goroutine is starting shares the file description.
	return errors.Join(flock(file, unix.LOCK_UN), file.Close())
}

// errAgain says that the lock is held, or that path no longer names the locked file.
var errAgain = errors.New("try again")

func try(path string, mode Mode) (*os.File, error) {
	file, err := open(path)
	if err != nil {
		return nil, err
	}
	if err := lockNamed(file, path, mode); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// open first omits O_CREATE, which the kernel refuses for directories.
func open(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	}
	return file, err
}

// lockNamed locks file and checks that path still names it: a lock on a file that was
// replaced after open excludes nobody who opens path later.
func lockNamed(file *os.File, path string, mode Mode) error {
	err := flock(file, int(mode)|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return errAgain
	}
	if err != nil {
		return err
	}
	locked, err := file.Stat()
	if err != nil {
		return err
	}
	named, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return errAgain
	}
	if err != nil {
		return err
	}
	if !os.SameFile(locked, named) {
		return errAgain
	}
	return nil
}

func flock(file *os.File, operation int) error {
	for {
		err := unix.Flock(int(file.Fd()), operation)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError("flock", err)
		}
	}
}

// wait returns nil after pause, or the cause if ctx ends first.
func wait(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
