package ipam

import (
	"encoding/json"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
)

// Range is the addresses of one subnet from Start to End, inclusive. It contains neither
// the subnet's network address (in IPv6 the subnet-router anycast address) nor its IPv4
// broadcast address. The gateway may be in the range, which skips it, or elsewhere, even
// outside the subnet.
type Range struct {
	Subnet     netip.Prefix
	Start, End netip.Addr
	Gateway    netip.Addr
}

// RangeSet is a list of ranges of one family. An attachment gets one address of a set.
type RangeSet []Range

func (r Range) String() string {
	return fmt.Sprintf("%s-%s", r.Start, r.End)
}

func (s RangeSet) String() string {
	var texts []string
	for _, r := range s {
		texts = append(texts, r.String())
	}
	return strings.Join(texts, ",")
}

func (r Range) contains(addr netip.Addr) bool {
	return addr.BitLen() == r.Start.BitLen() && r.Start.Compare(addr) <= 0 && addr.Compare(r.End) <= 0
}

func (r Range) overlaps(other Range) bool {
	return r.contains(other.Start) || other.contains(r.Start)
}

func (s RangeSet) contains(addr netip.Addr) bool {
	return slices.ContainsFunc(s, func(r Range) bool { return r.contains(addr) })
}

func (s RangeSet) startsAt(addr netip.Addr) bool {
	return slices.ContainsFunc(s, func(r Range) bool { return r.Start == addr })
}

// isGateway reports whether an address is the gateway of any range. It looks at all of
// them, because two ranges may share a subnet of which only one names the gateway.
func (s RangeSet) isGateway(addr netip.Addr) bool {
	return slices.ContainsFunc(s, func(r Range) bool { return r.Gateway == addr })
}

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

// keyedRange is a range with its configuration key.
type keyedRange struct {
	key string
	Range
}

func parseRangeSets(key string, raw json.RawMessage) ([][]keyedRange, error) {
	elements, err := decode[[]json.RawMessage](key, raw, "a list of range sets")
	if err != nil {
		return nil, err
	}
	var sets [][]keyedRange
	for i, element := range elements {
		set, err := parseRangeSet(fmt.Sprintf("%s[%d]", key, i), element)
		if err != nil {
			return nil, err
		}
		sets = append(sets, set)
	}
	return sets, nil
}

func parseRangeSet(key string, raw json.RawMessage) ([]keyedRange, error) {
	elements, err := decode[[]json.RawMessage](key, raw, "a list of ranges")
	if err != nil {
		return nil, err
	}
	if len(elements) == 0 {
		return nil, configErrorf(key, raw, "expected at least one range")
	}
	var set []keyedRange
	for i, element := range elements {
		key := fmt.Sprintf("%s[%d]", key, i)
		rawRange, err := decode[rawRange](key, element, "an object")
		if err != nil {
			return nil, err
		}
		r, err := parseRange(key, rawRange)
		if err != nil {
			return nil, err
		}
		if i > 0 && r.Start.BitLen() != set[0].Start.BitLen() {
			return nil, configErrorf(key+".subnet", rawRange.Subnet, "expected the same address family as %s", set[0].key)
		}
		set = append(set, keyedRange{key, r})
	}
	return set, nil
}

// parseLegacyRange parses the range whose keys are in the "ipam" object itself. Without a
// subnet there is none, and the other keys are ignored, as host-local does.
func parseLegacyRange(raw rawRange) ([][]keyedRange, error) {
	if !present(raw.Subnet) {
		return nil, nil
	}
	r, err := parseRange("ipam", raw)
	if err != nil {
		return nil, err
	}
	return [][]keyedRange{{{"ipam.subnet", r}}}, nil
}

// parseRange applies host-local's defaults: the gateway is the subnet's first address,
// and the range is the whole subnet.
func parseRange(key string, raw rawRange) (Range, error) {
	subnet, err := parseSubnet(key+".subnet", raw.Subnet)
	if err != nil {
		return Range{}, err
	}
	gateway, err := parseGateway(key+".gateway", raw.Gateway, subnet)
	if err != nil {
		return Range{}, err
	}
	first, last := usable(subnet)
	start, err := parseBound(key+".rangeStart", raw.RangeStart, subnet, first)
	if err != nil {
		return Range{}, err
	}
	end, err := parseBound(key+".rangeEnd", raw.RangeEnd, subnet, last)
	if err != nil {
		return Range{}, err
	}
	r := Range{Subnet: subnet, Start: maxAddr(start, first), End: minAddr(end, last), Gateway: gateway}
	if r.End.Less(r.Start) {
		return Range{}, fmt.Errorf("%w: %s: expected a usable address from rangeStart %s to rangeEnd %s", ErrConfig, key, start, end)
	}
	return r, nil
}

func parseSubnet(key string, raw json.RawMessage) (netip.Prefix, error) {
	const expected = "a subnet such as 10.1.0.0/16"
	if !present(raw) {
		return netip.Prefix{}, fmt.Errorf("%w: %s: missing; expected %s", ErrConfig, key, expected)
	}
	text, err := decode[string](key, raw, expected)
	if err != nil {
		return netip.Prefix{}, err
	}
	subnet, err := netip.ParsePrefix(text)
	if err != nil || subnet.Addr().Is4In6() {
		return netip.Prefix{}, configErrorf(key, raw, "expected %s", expected)
	}
	if subnet != subnet.Masked() {
		return netip.Prefix{}, configErrorf(key, raw, "has host bits set; expected %s", subnet.Masked())
	}
	if longest := subnet.Addr().BitLen() - 2; subnet.Bits() > longest {
		return netip.Prefix{}, configErrorf(key, raw, "too small; expected /%d or larger", longest)
	}
	return subnet, nil
}

// parseGateway, like host-local, accepts a gateway outside the subnet, which on-link
// routes need.
func parseGateway(key string, raw json.RawMessage, subnet netip.Prefix) (netip.Addr, error) {
	gateway, err := decodeAddr(key, raw)
	if err != nil {
		return netip.Addr{}, err
	}
	if !gateway.IsValid() {
		return subnet.Addr().Next(), nil
	}
	if gateway.BitLen() != subnet.Addr().BitLen() {
		return netip.Addr{}, configErrorf(key, raw, "expected the address family of subnet %s", subnet)
	}
	return gateway, nil
}

func parseBound(key string, raw json.RawMessage, subnet netip.Prefix, absent netip.Addr) (netip.Addr, error) {
	addr, err := decodeAddr(key, raw)
	if err != nil {
		return netip.Addr{}, err
	}
	if !addr.IsValid() {
		return absent, nil
	}
	if !subnet.Contains(addr) {
		return netip.Addr{}, configErrorf(key, raw, "expected an address in subnet %s", subnet)
	}
	return addr, nil
}

// usable returns the first and the last address that a container may get.
func usable(subnet netip.Prefix) (first, last netip.Addr) {
	last = lastOf(subnet)
	if last.Is4() {
		last = last.Prev()
	}
	return subnet.Addr().Next(), last
}

func lastOf(prefix netip.Prefix) netip.Addr {
	bits := prefix.Addr().AsSlice()
	for i := prefix.Bits(); i < 8*len(bits); i++ {
		bits[i/8] |= 0x80 >> (i % 8)
	}
	last, _ := netip.AddrFromSlice(bits)
	return last
}

// refuseOverlap returns an error for ranges that overlap, within a set or between sets: an
// address in two ranges would have two gateways, or count as free twice.
func refuseOverlap(ranges []keyedRange) error {
	for i, r := range ranges {
		for _, earlier := range ranges[:i] {
			if r.overlaps(earlier.Range) {
				return fmt.Errorf("%w: %s %q: overlaps %s %q", ErrConfig, r.key, r, earlier.key, earlier)
			}
		}
	}
	return nil
}

func minAddr(addrs ...netip.Addr) netip.Addr { return slices.MinFunc(addrs, netip.Addr.Compare) }
func maxAddr(addrs ...netip.Addr) netip.Addr { return slices.MaxFunc(addrs, netip.Addr.Compare) }

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
