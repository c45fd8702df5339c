package ipam

import (
	"iter"
	"net/netip"
	"slices"
)

// candidates yields each assignable address of the set once, in the order to try them.
// Like host-local it goes round robin: it starts after last and ends with last, so that
// an address rests as long as possible before it is assigned again. If the set does not
// contain last, or last is the zero Addr, it starts at the front.
//
// At the start of each contiguous part it calls begin, unless nil, with the part's first
// address; begin may return a later address, to skip those before it.
func (s RangeSet) candidates(last netip.Addr, begin func(netip.Addr) netip.Addr) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		for _, r := range s.rotate(last) {
			if begin != nil {
				r.Start = maxAddr(r.Start, minAddr(begin(r.Start), r.End))
			}
			// The last address may have no successor, so compare before the step.
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

// rotate splits the set after last and puts the second part first.
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
