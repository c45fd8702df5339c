package ipam

import (
	"errors"
	"io/fs"
	"net/netip"
	"slices"
)

// record is one reservation file.
type record struct {
	path   string
	addr   netip.Addr
	holder Attachment
	// err says why holder is unknown: errTorn, or the error of reading the file. An
	// unreadable file keeps its address, and must not affect the others.
	err error
}

func (r record) isAbsent() bool { return errors.Is(r.err, fs.ErrNotExist) }
func (r record) isTorn() bool   { return errors.Is(r.err, errTorn) }

// heldBy returns the records of a, or else those that an old host-local wrote with the
// container id alone.
func (s *store) heldBy(a Attachment) ([]record, error) {
	records, err := s.recordsFor(a)
	if err != nil {
		return nil, err
	}
	var own, old []record
	for _, r := range records {
		switch {
		case r.isTorn(): // logged when it is discarded
		case r.err != nil:
			s.log.Warn("skip unreadable reservation", "path", r.path, "error", r.err)
			s.abandonIndex(r.err) // it would lack this record
		case r.holder == a:
			own = append(own, r)
		case r.holder == a.old():
			old = append(old, r)
		}
	}
	if len(own) > 0 {
		return own, nil
	}
	return old, nil
}

// recordsFor returns records that include all of a's.
func (s *store) recordsFor(a Attachment) ([]record, error) {
	if s.index != nil {
		own, ownErr := s.index.find(a)
		old, oldErr := s.index.find(a.old())
		err := errors.Join(ownErr, oldErr)
		if err == nil {
			names := append(own, old...) // a file may have changed from one to the other
			slices.Sort(names)
			return s.readEach(slices.Compact(names)), nil
		}
		s.abandonIndex(err)
	}
	if s.isShared || s.indexRoot == "" {
		return s.records()
	}
	state, stampErr := stampNew(s.dir)
	records, err := s.records()
	if err == nil && stampErr == nil {
		s.index, stampErr = buildIndex(s.indexRoot, s.boot, state, records)
	}
	if stampErr != nil {
		s.abandonIndex(stampErr)
	}
	return records, err
}

// abandonIndex drops the index, so the next operation reads all records.
func (s *store) abandonIndex(why error) {
	s.index = nil
	s.log.Debug("continue without an index of the reservations", "dir", s.dir, "error", why)
}

func (s *store) updateIndex(change func(*index) error) {
	if s.index == nil {
		return
	}
	if err := change(s.index); err != nil {
		s.abandonIndex(err)
	}
}

// dropFromIndex removes a, which no longer holds anything, from the index.
func (s *store) dropFromIndex(a Attachment) {
	s.updateIndex(func(i *index) error { return i.drop(a) })
}

// records reads all reservations, in no particular order.
func (s *store) records() ([]record, error) {
	names, err := readNames(s.dir)
	if err != nil {
		return nil, err
	}
	records := s.readEach(names)
	for _, r := range records {
		s.markUnmarked(r)
	}
	return records, nil
}

// readEach reads those files that are reservations.
func (s *store) readEach(names []string) []record {
	var records []record
	for _, name := range names {
		addr, err := netip.ParseAddr(name)
		if err != nil {
			continue
		}
		if r := s.read(name, addr); !r.isAbsent() { // someone has just removed it
			records = append(records, r)
		}
	}
	return records
}
