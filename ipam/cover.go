package ipam

import "net/netip"

// Prefixes returns the prefixes that cover the range. A bound of the range that is the subnet's own covers the rest of the
// subnet, too: the whole subnet is one prefix.
func (r Range) Prefixes() (prefixes []netip.Prefix) {
	first, last := usable(r.Subnet)
	start, end := r.Start, r.End
	if start == first {
		start = r.Subnet.Addr()
	}
	if end == last && end.Is4() {
		end = end.Next() // the broadcast address
	}
	for start.IsValid() && !end.Less(start) {
		prefix := largestAt(start, end)
		prefixes = append(prefixes, prefix)
		start = lastOf(prefix).Next()
	}
	return prefixes
}

// largestAt returns the largest prefix that begins at start and ends before or at end.
func largestAt(start, end netip.Addr) netip.Prefix {
	bits := start.BitLen()
	for bits > 0 {
		larger, _ := start.Prefix(bits - 1)
		if larger.Addr() != start || end.Less(lastOf(larger)) {
			break
		}
		bits--
	}
	return netip.PrefixFrom(start, bits)
}
