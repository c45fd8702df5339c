package ipam

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// index finds the records of an attachment without reading all of them. It is a directory
// of symbolic links on a file system that a reboot empties: one link per attachment,
// whose target lists the names of the attachment's files.
//
// The modification time of the reservation directory proves that the index is fresh. At
// its end, an operation sets it to a time before 2001, which is part of the index's name.
// Adding or removing a record changes it to the present. So an index is found only if no
// other program, and no killed process, has changed anything since. Otherwise all records
// are read and a new index is built.
//
// Each record that the index names is read and compared, so a surplus entry does no harm.
// A missing one would: an operation that cannot write an entry abandons the index.
type index struct {
	path  string
	stamp unix.Timespec // of the reservation directory
}

// separator cannot occur in a file name.
const separator = "/"

// openIndex returns the index of dir's current state, or nil.
func openIndex(root, boot, dir string) *index {
	if root == "" {
		return nil
	}
	state, err := statDir(dir)
	if err != nil {
		return nil
	}
	i := &index{path: indexPath(root, boot, state), stamp: state.Mtim}
	if _, err := os.Stat(i.path); err != nil {
		return nil
	}
	return i
}

// stampNew gives dir a stamp that no index has. Call it before reading the records for a
// new index.
func stampNew(dir string) (*unix.Stat_t, error) {
	const until2001 = 1e18 // nanoseconds since 1970: no clock shows such a time today
	if err := setStamp(dir, unix.NsecToTimespec(rand.Int64N(until2001))); err != nil {
		return nil, err
	}
	return statDir(dir) // the file system may have rounded it
}

// buildIndex builds the index of a directory's state from all its records. Other
// processes find it only when it is complete.
func buildIndex(root, boot string, state *unix.Stat_t, records []record) (*index, error) {
	held := map[Attachment][]record{}
	for _, r := range records {
		if r.isTorn() {
			continue
		}
		if r.err != nil {
			return nil, fmt.Errorf("index reservations: unknown holder: %w", r.err)
		}
		held[r.holder] = append(held[r.holder], r)
	}
	path := indexPath(root, boot, state)
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("index reservations: %w", err)
	}
	i := &index{path: path + ".half", stamp: state.Mtim}
	if err := os.MkdirAll(i.path, 0o700); err != nil {
		return nil, fmt.Errorf("index reservations: %w", err)
	}
	for a, records := range held {
		if err := i.put(a, records); err != nil {
			return nil, err
		}
	}
	if err := os.Rename(i.path, path); err != nil {
		return nil, fmt.Errorf("index reservations: %w", err)
	}
	i.path = path
	return i, nil
}

// seal declares that the index matches the current state of dir.
func (i *index) seal(dir string) error { return setStamp(dir, i.stamp) }

// find returns the names of files that may be records of a.
func (i *index) find(a Attachment) ([]string, error) {
	names, err := os.Readlink(i.link(a))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up reservation: %w", err)
	}
	return strings.Split(names, separator), nil
}

// put replaces the entry of a by records, which must be all records of a.
func (i *index) put(a Attachment, records []record) error {
	var names []string
	for _, r := range records {
		names = append(names, filepath.Base(r.path))
	}
	err := i.drop(a)
	if err == nil {
		err = os.Symlink(strings.Join(names, separator), i.link(a))
	}
	if err != nil {
		return fmt.Errorf("index reservation: %w", err)
	}
	return nil
}

func (i *index) drop(a Attachment) error {
	if err := os.Remove(i.link(a)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// link hashes the attachment, because a container id may be longer than a file name.
func (i *index) link(a Attachment) string {
	return filepath.Join(i.path, fmt.Sprintf("%x", sha256.Sum256(encodeRecord(a))))
}

func indexPath(root, boot string, state *unix.Stat_t) string {
	return filepath.Join(root, fmt.Sprintf("%d-%d", state.Dev, state.Ino), fmt.Sprintf("%s.%d", boot, state.Mtim.Nano()))
}

func statDir(dir string) (*unix.Stat_t, error) {
	state := &unix.Stat_t{}
	if err := unix.Stat(dir, state); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	return state, nil
}

func setStamp(dir string, stamp unix.Timespec) error {
	times := []unix.Timespec{{Nsec: unix.UTIME_OMIT}, stamp}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, dir, times, 0); err != nil {
		return &fs.PathError{Op: "utimensat", Path: dir, Err: err}
	}
	return nil
}

// takenRun is a run of consecutive reserved addresses, from first up to but not including
// end. The index has long runs at the starts of ranges, so that the round robin can skip
// them.
type takenRun struct {
	first, end netip.Addr
}

func (r takenRun) contains(addr netip.Addr) bool {
	return addr.BitLen() == r.first.BitLen() && r.first.Compare(addr) <= 0 && addr.Less(r.end)
}

// endOfTakenRun returns the end of the run that starts with first, or first if there is
// none.
func (s *store) endOfTakenRun(first netip.Addr) netip.Addr {
	for _, r := range s.takenRuns() {
		if r.first == first {
			return r.end
		}
	}
	return first
}

// addTakenRun adds a run to the index, in place of one with the same start.
func (s *store) addTakenRun(run takenRun) {
	runs := slices.DeleteFunc(s.takenRuns(), func(r takenRun) bool { return r.first == run.first })
	s.putTakenRuns(append(runs, run))
}

// cutTakenRun ends the run that contains addr before addr, which becomes free.
func (s *store) cutTakenRun(addr netip.Addr) {
	runs := s.takenRuns()
	for i, r := range runs {
		if r.contains(addr) {
			runs[i].end = addr
			s.putTakenRuns(runs)
		}
	}
}

func (s *store) takenRuns() []takenRun {
	if s.index == nil {
		return nil
	}
	text, err := os.Readlink(s.index.takenRuns())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var runs []takenRun
	for word := range strings.SplitSeq(text, separator) {
		first, end, _ := strings.Cut(word, "-")
		r := takenRun{}
		var firstErr, endErr error
		r.first, firstErr = netip.ParseAddr(first)
		r.end, endErr = netip.ParseAddr(end)
		if err := errors.Join(err, firstErr, endErr); err != nil {
			s.abandonIndex(err)
			return nil
		}
		runs = append(runs, r)
	}
	return runs
}

func (s *store) putTakenRuns(runs []takenRun) {
	var words []string
	for _, r := range runs {
		words = append(words, fmt.Sprintf("%s-%s", r.first, r.end))
	}
	s.updateIndex(func(i *index) error {
		err := os.Remove(i.takenRuns())
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = os.Symlink(strings.Join(words, separator), i.takenRuns())
		}
		return err
	})
}

func (i *index) takenRuns() string { return filepath.Join(i.path, "taken") }
