package ipam

import (
	"iter"
	"net/netip"
	"slices"
)

// candidates yields each address that the set may give out once, in the order to try them.
// Like host-local it goes round robin: on from last, which comes at the very end, so that
// an address rests for as long as possible before it is given out again. A last that the
// set does not contain, or the zero Addr, starts at the front.
//
// Where addresses do not follow each other, begin, if any, is called with the next one, and
// may return one that is further on, to leave out those between.
func (s RangeSet) candidates(last netip.Addr, begin func(netip.Addr) netip.Addr) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, r := range s.rotate(last) {
			if begin != nil {
				r.Start = maxAddr(r.Start, minAddr(begin(r.Start), r.End))
			}
			// Past the end there may be no next address, so compare before the step.
			for addr := r.Start; ; addr = addr.Next() {
				if !s.isGateway(addr) && !yield(addr) {
					return
				}
				if addr == r.End {
					break
				}
			}
		}
	}
}

// rotate cuts the set after last and puts the second part first.
func (s RangeSet) rotate(last netip.Addr) []Range {
	i := slices.IndexFunc(s, func(r Range) bool { return r.contains(last) })
	if i < 0 {
		return s
	}
	before, after := s[i], s[i]
	before.End = last
	after.Start = last.Next()

	var rotated []Range
	if last != s[i].End {
		rotated = append(rotated, after)
	}
	return slices.Concat(rotated, s[i+1:], s[:i], []Range{before})
}
