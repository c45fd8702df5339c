// Package flock takes advisory locks between processes with flock(2).
//
// A lock belongs to an open file description: it ends with Release or with the
// process that holds it, however that process dies, so nothing is ever left to
// clean up. Two Acquire calls of one process exclude each other as those of two
// processes do. Lock files are never deleted, because a process that waits for
// a deleted file would share its lock with nobody.
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

// Mode says whom a lock excludes.
type Mode int

const (
	// Shared excludes exclusive locks only: for readers.
	Shared Mode = unix.LOCK_SH
	// Exclusive excludes every other lock: for writers.
	Exclusive Mode = unix.LOCK_EX
)

// ErrBusy is wrapped by Acquire when the context ends while others hold the lock.
var ErrBusy = errors.New("lock is held by another process")

// The kernel has no flock with a deadline, so a waiter polls. It starts fast,
// because locks here are held for milliseconds, and slows down to spare the holder.
const (
	firstPause = 500 * time.Microsecond
	lastPause  = 16 * time.Millisecond
)

// Lock is a held lock.
type Lock struct {
	file *os.File
}

// Acquire locks path, which is an existing directory or a file, created with
// mode 0600 if absent. It waits until ctx ends, and tries at least once. The
// error then wraps ErrBusy and the cause of ctx's end; any other error is that
// of opening or locking path. The caller must call Release.
func Acquire(ctx context.Context, path string, how Mode) (*Lock, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		file, err := try(path, how)
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

// Release gives the lock up. A nil or released Lock is left alone. It is not
// for concurrent use.
func (l *Lock) Release() error {
	if l == nil || l.file == nil {
		return nil
	}
	file := l.file
	l.file = nil

	// Closing alone would not do: a child that another goroutine is just
	// starting shares the file description until its exec.
	return errors.Join(flock(file, unix.LOCK_UN), file.Close())
}

// errAgain says that the lock is held, or was won on a file that path no longer names.
var errAgain = errors.New("try again")

func try(path string, how Mode) (*os.File, error) {
	file, err := open(path)
	if err != nil {
		return nil, err
	}
	if err := lockNamed(file, path, how); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// open leaves O_CREATE out at first, since the kernel refuses it for directories.
func open(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
	}
	return file, err
}

// lockNamed locks file and makes sure that path still names it: a lock on a
// file that was replaced after open excludes nobody who comes later.
func lockNamed(file *os.File, path string, how Mode) error {
	err := flock(file, int(how)|unix.LOCK_NB)
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

// wait returns nil after pause, or why ctx ended before that.
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
