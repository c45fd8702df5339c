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
