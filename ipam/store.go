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
	"slices"
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
	dir      string
	lock     *flock.Lock
	isShared bool // for reading only
	log      *slog.Logger

	indexRoot string
	index     *index // nil where none is fresh
	boot      string // the id of this boot, or ""
	lives     func(Attachment) bool
}

// create makes the network's directory if needed and opens it.
func (p *Pool) create(ctx context.Context) (*store, error) {
	if err := os.MkdirAll(p.cfg.Dir(), 0o755); err != nil {
		return nil, fmt.Errorf("create reservation directory: %w", err)
	}
	return p.open(ctx, flock.Exclusive)
}

// open locks the network's directory; without one the error wraps fs.ErrNotExist. A store
// that is locked shared is for reading only. The caller must call close.
func (p *Pool) open(ctx context.Context, how flock.Mode) (*store, error) {
	s := &store{dir: p.cfg.Dir(), isShared: how == flock.Shared, log: p.log,
		indexRoot: p.options.IndexDir, boot: p.boot(), lives: p.options.Lives}
	lock, err := flock.Acquire(ctx, s.path(lockName), how)
	if err != nil {
		return nil, err
	}
	s.lock = lock
	if !s.isShared {
		s.removeTemporary() // of a process that was killed
	}
	s.index = openIndex(s.indexRoot, s.boot, s.dir)
	return s, nil
}

func (s *store) close() {
	if s.index != nil && !s.isShared {
		if err := s.index.seal(s.dir); err != nil {
			s.log.Debug("leave no index of the reservations", "dir", s.dir, "err", err)
		}
	}
	if err := s.lock.Release(); err != nil {
		s.log.Warn("release lock", "dir", s.dir, "err", err)
	}
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

// isFree says that nothing stands at an address.
func (s *store) isFree(addr netip.Addr) (bool, error) {
	_, err := os.Lstat(s.path(addr.String()))
	return errors.Is(err, fs.ErrNotExist), nil
}

// isReclaimable says of an address that is not free that nobody has it.
func (s *store) isReclaimable(addr netip.Addr) (bool, error) {
	r := s.lookup(addr)
	return r.isAbsent() || r.isTorn() || s.isDead(r), nil
}

// stage writes a's record under the temporary name, for claim to publish. The caller
// must call removeTemporary when the claims are done. Nothing is synced: a loss of power
// ends the containers as well, and a record that it cuts short is torn.
func (s *store) stage(a Attachment) error {
	err := s.writeTemporary(encodeRecord(a), s.mark)
	if err != nil {
		return fmt.Errorf("write reservation: %w", err)
	}
	return nil
}

// claim reserves addr for the staged record, unless something stands there.
//
// The link, unlike a rename, also fails where somebody writes without the lock.
func (s *store) claim(addr netip.Addr) (bool, error) {
	err := os.Link(s.path(temporaryName), s.path(addr.String()))
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reserve %s: %w", addr, err)
	}
	return true, nil
}

// take is claim where something may stand: what nobody has, or mine, is replaced. It
// returns the record that stands in the way, or nil.
func (s *store) take(addr netip.Addr, mine []record) (*record, error) {
	for {
		if claimed, err := s.claim(addr); claimed || err != nil {
			return nil, err
		}
		standing := s.lookup(addr)
		var err error
		switch {
		case standing.isAbsent(): // removed by hand just now
		case standing.isTorn():
			err = s.removeTorn(standing)
		case slices.ContainsFunc(mine, func(r record) bool { return r.path == standing.path }):
			err = s.remove(standing)
		case s.isDead(standing):
			s.log.Info("take the address of a container that went with an earlier boot", "path", standing.path, "holder", standing.holder)
			err = s.remove(standing)
		default:
			return &standing, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// release frees what held says, as far as it can.
func (s *store) release(held []record) error {
	if len(held) == 0 {
		return nil
	}
	var errs []error
	for _, r := range held {
		errs = append(errs, s.remove(r))
	}
	err := errors.Join(errs...)
	if err != nil {
		s.abandonIndex(err)
	}
	return err
}

// remove frees an address. It is no error if that is free already.
func (s *store) remove(r record) error {
	s.cutRow(r.addr)
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("release address: %w", err)
	}
	return nil
}

func (s *store) removeTorn(r record) error {
	s.log.Warn("discard torn reservation", "path", r.path)
	return s.remove(r)
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
	if err := s.writeTemporary([]byte(addr.String()), nil); err != nil {
		return fmt.Errorf("write last reserved address: %w", err)
	}
	if err := os.Rename(s.path(temporaryName), s.lastPath(set)); err != nil {
		s.removeTemporary()
		return fmt.Errorf("write last reserved address: %w", err)
	}
	return nil
}

// probe finds out whether a reservation could be written: a read-only, full or
// forbidden directory is not usable.
func (s *store) probe() error {
	if err := s.writeTemporary([]byte("probe"), nil); err != nil {
		return fmt.Errorf("write to reservation directory: %w", err)
	}
	s.removeTemporary()
	return nil
}

// writeTemporary refuses to overwrite: a staged file may already be linked to an address.
// It calls finish, if any, before it closes the file.
func (s *store) writeTemporary(content []byte, finish func(*os.File)) error {
	file, err := os.OpenFile(s.path(temporaryName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	if err == nil && finish != nil {
		finish(file)
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
