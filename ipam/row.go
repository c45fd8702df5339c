package ipam

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// row is addresses from first until before end that are all taken. The index keeps the long
// ones at which ranges start, so that the round robin need not try them each time it comes
// around.
type row struct {
	first, end netip.Addr
}

func (r row) contains(addr netip.Addr) bool {
	return addr.BitLen() == r.first.BitLen() && r.first.Compare(addr) <= 0 && addr.Less(r.end)
}

// endOfRow returns the address that comes after the row from first, or first.
func (s *store) endOfRow(first netip.Addr) netip.Addr {
	for _, r := range s.rows() {
		if r.first == first {
			return r.end
		}
	}
	return first
}

func (s *store) noteRow(noted row) {
	rows := slices.DeleteFunc(s.rows(), func(r row) bool { return r.first == noted.first })
	s.putRows(append(rows, noted))
}

// cutRow is for an address that becomes free.
func (s *store) cutRow(addr netip.Addr) {
	rows := s.rows()
	for i, r := range rows {
		if r.contains(addr) {
			rows[i].end = addr
			s.putRows(rows)
		}
	}
}

func (s *store) rows() []row {
	if s.index == nil {
		return nil
	}
	text, err := os.Readlink(s.index.rows())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var rows []row
	for word := range strings.SplitSeq(text, separator) {
		first, end, _ := strings.Cut(word, "-")
		r := row{}
		var firstErr, endErr error
		r.first, firstErr = netip.ParseAddr(first)
		r.end, endErr = netip.ParseAddr(end)
		if err := errors.Join(err, firstErr, endErr); err != nil {
			s.abandonIndex(err)
			return nil
		}
		rows = append(rows, r)
	}
	return rows
}

func (s *store) putRows(rows []row) {
	if s.index == nil {
		return
	}
	var words []string
	for _, r := range rows {
		words = append(words, fmt.Sprintf("%s-%s", r.first, r.end))
	}
	err := os.Remove(s.index.rows())
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		err = os.Symlink(strings.Join(words, separator), s.index.rows())
	}
	if err != nil {
		s.abandonIndex(err)
	}
}

func (i *index) rows() string { return filepath.Join(i.path, "rows") }
