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
	fd int // 0: released
}

// Acquire locks path, which is an existing directory, or a file that is created with
// mode 0600 if absent. It tries at least once, and until ctx ends. Then the error wraps
// ErrBusy and the cause of ctx's end; any other error comes from opening or locking
// path. The caller must call Release.
func Acquire(ctx context.Context, path string, mode Mode) (*Lock, error) {
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		fd, err := try(path, mode)
		if err == nil {
			return &Lock{fd: fd}, nil
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
	if l == nil || l.fd == 0 {
		return nil
	}
	fd := l.fd
	l.fd = 0

	// Closing the file is not enough: until its exec, a child process that another
	// goroutine is starting shares the file description.
	return errors.Join(flock(fd, unix.LOCK_UN), unix.Close(fd))
}

// errAgain says that the lock is held, or that path no longer names the locked file.
var errAgain = errors.New("try again")

func try(path string, mode Mode) (fd int, err error) {
	fd, err = open(path)
	if err != nil {
		return 0, err
	}
	if err := lockNamed(fd, path, mode); err != nil {
		unix.Close(fd)
		return 0, err
	}
	return fd, nil
}

// open first omits O_CREAT, which the kernel refuses for directories. Package os would cost three times as many system calls.
func open(path string) (fd int, err error) {
	for _, create := range []int{0, unix.O_CREAT} {
		err = retry("open", func() (err error) {
			fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|create, 0o600)
			return err
		})
		if !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	return fd, err
}

// lockNamed locks fd and checks that path still names its file: a lock on a file that was
// replaced after open excludes nobody who opens path later.
func lockNamed(fd int, path string, mode Mode) error {
	err := flock(fd, int(mode)|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return errAgain
	}
	if err != nil {
		return err
	}
	var locked, named unix.Stat_t
	if err := unix.Fstat(fd, &locked); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	err = retry("stat", func() error { return unix.Stat(path, &named) })
	if errors.Is(err, fs.ErrNotExist) {
		return errAgain
	}
	if err != nil {
		return err
	}
	if locked.Dev != named.Dev || locked.Ino != named.Ino {
		return errAgain
	}
	return nil
}

func flock(fd, operation int) error {
	return retry("flock", func() error { return unix.Flock(fd, operation) })
}

// retry calls a system call until no signal interrupts it.
func retry(name string, call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return os.NewSyscallError(name, err)
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
