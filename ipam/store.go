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

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

const (
	lockName      = "lock"
	lastPrefix    = "last_reserved_ip."
	temporaryName = ".ebpfnet.tmp" // no address, so host-local ignores it
)

// store is a network's directory, locked. While it is open, no other process of ours and
// no host-local changes the directory.
type store struct {
	dir      string
	lock     *flock.Lock
	isShared bool // locked for reading only
	log      *slog.Logger

	indexRoot string
	index     *index // nil: none is fresh
	boot      string // the id of this boot, or ""
	alive     func(Attachment) bool
}

// create opens the network's directory, and creates it if necessary.
func (p *Pool) create(ctx context.Context) (*store, error) {
	if err := os.MkdirAll(p.cfg.Dir(), 0o755); err != nil {
		return nil, fmt.Errorf("create reservation directory: %w", err)
	}
	return p.open(ctx, flock.Exclusive)
}

// open locks the network's directory; if that does not exist, the error wraps
// fs.ErrNotExist. A store with a shared lock is for reading only. The caller must call
// close.
func (p *Pool) open(ctx context.Context, mode flock.Mode) (*store, error) {
	s := &store{dir: p.cfg.Dir(), isShared: mode == flock.Shared, log: p.log,
		indexRoot: p.options.IndexDir, boot: p.boot(), alive: p.options.Alive}
	lock, err := flock.Acquire(ctx, s.path(lockName), mode)
	if errors.Is(err, unix.ENAMETOOLONG) { // Reserve has never made such a directory
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	if err != nil {
		return nil, err
	}
	s.lock = lock
	if !s.isShared {
		s.removeTemporary() // of a killed process
	}
	s.index = openIndex(s.indexRoot, s.boot, s.dir)
	return s, nil
}

// ifExists calls use with the open store. It does nothing if the network's directory does not exist.
func (p *Pool) ifExists(ctx context.Context, mode flock.Mode, use func(*store) error) error {
	s, err := p.open(ctx, mode)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.close()
	return use(s)
}

func (s *store) close() {
	if s.index != nil && !s.isShared {
		if err := s.index.seal(s.dir); err != nil {
			s.log.Debug("cannot keep the index of the reservations", "dir", s.dir, "error", err)
		}
	}
	if err := s.lock.Release(); err != nil {
		s.log.Warn("release lock", "dir", s.dir, "error", err)
	}
}

// lookup returns the record of an address, which may be absent.
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

// isFree reports whether an address has no reservation file.
func (s *store) isFree(addr netip.Addr) (bool, error) {
	_, err := os.Lstat(s.path(addr.String()))
	return errors.Is(err, fs.ErrNotExist), nil
}

// isReclaimable reports whether the holder of a reserved address is gone.
func (s *store) isReclaimable(addr netip.Addr) (bool, error) {
	r := s.lookup(addr)
	return r.isAbsent() || r.isTorn() || s.isDead(r), nil
}

// stage writes a's record under the temporary name, for reserve to link. The caller must
// call removeTemporary afterwards. Nothing is synced: a loss of power ends the containers
// too, and an incomplete record counts as torn.
func (s *store) stage(a Attachment) error {
	err := s.writeTemporary(encodeRecord(a), s.mark)
	if err != nil {
		return fmt.Errorf("write reservation: %w", err)
	}
	return nil
}

// reserve links the staged record to addr, and returns false if addr is taken. Unlike a
// rename, a link also fails if someone has written there without the lock.
func (s *store) reserve(addr netip.Addr) (bool, error) {
	err := os.Link(s.path(temporaryName), s.path(addr.String()))
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reserve %s: %w", addr, err)
	}
	return true, nil
}

// reclaim links the staged record to addr, in place of a record whose holder is gone, or
// of one in mine. If another attachment has addr, it returns the existing record.
func (s *store) reclaim(addr netip.Addr, mine []record) (*record, error) {
	for {
		if reserved, err := s.reserve(addr); reserved || err != nil {
			return nil, err
		}
		existing := s.lookup(addr)
		var err error
		switch {
		case existing.isAbsent(): // someone has just removed it
		case existing.isTorn():
			err = s.removeTorn(existing)
		case slices.ContainsFunc(mine, func(r record) bool { return r.path == existing.path }):
			err = s.remove(existing)
		case s.isDead(existing):
			s.log.Info("reclaim the address of a container of an earlier boot", "path", existing.path, "holder", existing.holder)
			err = s.remove(existing)
		default:
			return &existing, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// release frees the addresses of held. It continues after errors.
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

// remove frees an address, which may be free already.
func (s *store) remove(r record) error {
	s.cutTakenRun(r.addr)
	if err := os.Remove(r.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("release address: %w", err)
	}
	return nil
}

func (s *store) removeTorn(r record) error {
	s.log.Warn("discard torn reservation", "path", r.path)
	return s.remove(r)
}

// last returns the address that a range set assigned last, or the zero Addr. It is only
// the position of the round robin, so damage is harmless.
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

// setLast saves the address that a range set assigned last. It uses the temporary file,
// so no record may be staged meanwhile.
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

// probe returns an error if the directory is not writable.
func (s *store) probe() error {
	if err := s.writeTemporary([]byte("probe"), nil); err != nil {
		return fmt.Errorf("write to reservation directory: %w", err)
	}
	s.removeTemporary()
	return nil
}

// writeTemporary refuses to overwrite a file, since a staged one may already be linked to
// an address. It calls finish, unless nil, before it closes the file.
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

// removeTemporary ignores errors: a file that is left makes the next writeTemporary fail,
// with the path in its error.
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
