package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

const (
	lockName      = "lock"
	lastPrefix    = "last_reserved_ip."
	temporaryName = ".ebpfnet.tmp" // no address, so host-local passes over it
)

// store is a network's directory, locked. Holding a store proves that no other process
// of ours, and no host-local, changes the directory.
type store struct {
	dir  string
	lock *flock.Lock
	log  *slog.Logger
}

// record is one reservation file.
type record struct {
	path   string
	addr   netip.Addr
	holder Attachment
	// err says why holder is unknown: errTorn, or the error of reading the file. One
	// file that cannot be read keeps its address, and must not stop all the others.
	err error
}

func (r record) isAbsent() bool { return errors.Is(r.err, fs.ErrNotExist) }
func (r record) isTorn() bool   { return errors.Is(r.err, errTorn) }

// createStore makes the directory if needed and locks it exclusively.
func createStore(ctx context.Context, dir string, log *slog.Logger) (*store, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create reservation directory: %w", err)
	}
	return openStore(ctx, dir, flock.Exclusive, log)
}

// openStore locks a directory; without one the error wraps fs.ErrNotExist. A store
// that is locked shared is for reading only. The caller must call close.
func openStore(ctx context.Context, dir string, how flock.Mode, log *slog.Logger) (*store, error) {
	lock, err := flock.Acquire(ctx, filepath.Join(dir, lockName), how)
	if err != nil {
		return nil, err
	}
	s := &store{dir: dir, lock: lock, log: log}
	if how == flock.Exclusive {
		s.removeTemporary() // of a process that was killed
	}
	return s, nil
}

func (s *store) close() {
	if err := s.lock.Release(); err != nil {
		s.log.Warn("release lock", "dir", s.dir, "err", err)
	}
}

// heldBy returns what a holds: the records of its own or, only if there is none,
// those that an old host-local wrote with the container id alone.
//
// It reads every file, as host-local does. An index of our own could not know what
// host-local adds and removes.
func (s *store) heldBy(a Attachment) ([]record, error) {
	records, err := s.records()
	if err != nil {
		return nil, err
	}
	var own, old []record
	for _, r := range records {
		switch {
		case r.isTorn(): // logged when it is discarded
		case r.err != nil:
			s.log.Warn("pass over unreadable reservation", "path", r.path, "err", r.err)
		case r.holder == a:
			own = append(own, r)
		case r.holder == Attachment{ContainerID: a.ContainerID}:
			old = append(old, r)
		}
	}
	if len(own) > 0 {
		return own, nil
	}
	return old, nil
}

// records reads all reservations, in no order.
func (s *store) records() ([]record, error) {
	names, err := readNames(s.dir)
	if err != nil {
		return nil, err
	}
	var records []record
	for _, name := range names {
		addr, err := netip.ParseAddr(name)
		if err != nil {
			continue
		}
		if r := s.read(name, addr); !r.isAbsent() { // removed by hand just now
			records = append(records, r)
		}
	}
	return records, nil
}

// lookup returns the record of one address, which may be absent.
func (s *store) lookup(addr netip.Addr) record {
	return s.read(addr.String(), addr)
}

func (s *store) read(name string, addr netip.Addr) record {
	r := record{path: s.path(name), addr: addr}
	content, err := os.ReadFile(r.path)
	if err != nil {
		r.err = fmt.Errorf("read reservation: %w", err)
		return r
	}
	r.holder, r.err = decodeRecord(content)
	return r
}

// isFree tells whether claim would succeed.
func (s *store) isFree(addr netip.Addr) bool {
	r := s.lookup(addr)
	return r.isAbsent() || r.isTorn()
}

// stage writes a's record under the temporary name, safe from power loss, for claim
// to publish. The caller must call removeTemporary when the claims are done.
func (s *store) stage(a Attachment) error {
	if err := s.writeTemporary(encodeRecord(a), durable); err != nil {
		return fmt.Errorf("write reservation: %w", err)
	}
	return nil
}

// claim reserves addr for the staged record. It returns the record that stands in the
// way, or nil. A torn record does not: claim replaces it.
//
// The link, unlike a rename, also fails where somebody writes without the lock.
func (s *store) claim(addr netip.Addr) (*record, error) {
	for {
		err := os.Link(s.path(temporaryName), s.path(addr.String()))
		if err == nil {
			return nil, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("reserve %s: %w", addr, err)
		}
		standing := s.lookup(addr)
		switch {
		case standing.isAbsent(): // removed by hand just now
		case standing.isTorn():
			if err := s.removeTorn(standing); err != nil {
				return nil, err
			}
		default:
			return &standing, nil
		}
	}
}

// remove frees an address. It is no error if that is free already.
func (s *store) remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("release address: %w", err)
	}
	return nil
}

func (s *store) removeTorn(r record) error {
	s.log.Warn("discard torn reservation", "path", r.path)
	return s.remove(r.path)
}

// last returns the address that a range set gave last, or the zero Addr. It is a hint
// for the round robin, so damage to it costs nothing but the place.
func (s *store) last(set int) netip.Addr {
	content, err := os.ReadFile(s.lastPath(set))
	if err != nil {
		return netip.Addr{}
	}
	addr, err := netip.ParseAddr(string(content))
	if err != nil {
		return netip.Addr{}
	}
	return addr.Unmap()
}

// setLast must not be called while a record is staged.
func (s *store) setLast(set int, addr netip.Addr) error {
	if err := s.writeTemporary([]byte(addr.String()), volatile); err != nil {
		return fmt.Errorf("write last reserved address: %w", err)
	}
	if err := os.Rename(s.path(temporaryName), s.lastPath(set)); err != nil {
		s.removeTemporary()
		return fmt.Errorf("write last reserved address: %w", err)
	}
	return nil
}

// sync makes all claims and removals so far survive power loss.
func (s *store) sync() error {
	dir, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("sync reservation directory: %w", err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync reservation directory: %w", err)
	}
	return nil
}

// probe finds out whether a reservation could be written: a read-only, full or
// forbidden directory is not usable.
func (s *store) probe() error {
	if err := s.writeTemporary([]byte("probe"), volatile); err != nil {
		return fmt.Errorf("write to reservation directory: %w", err)
	}
	s.removeTemporary()
	return nil
}

type durability bool

const (
	durable  durability = true
	volatile durability = false
)

// writeTemporary refuses to overwrite: a staged file may already be linked to an address.
func (s *store) writeTemporary(content []byte, d durability) error {
	file, err := os.OpenFile(s.path(temporaryName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil && d == durable {
		err = file.Sync()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		s.removeTemporary()
		return err
	}
	return nil
}

// removeTemporary has no error to report: whatever is left makes the next
// writeTemporary fail, with the path in its error.
func (s *store) removeTemporary() {
	os.Remove(s.path(temporaryName))
}

func (s *store) path(name string) string {
	return filepath.Join(s.dir, name)
}

func (s *store) lastPath(set int) string {
	return s.path(lastPrefix + strconv.Itoa(set))
}

func readNames(path string) ([]string, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("list reservations: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list reservations: %w", err)
	}
	return names, nil
}
