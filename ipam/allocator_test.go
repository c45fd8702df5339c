package ipam

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

func TestCandidates(t *testing.T) {
	// 10.1.0.1 and fd00::1 are gateways.
	single := parseSets(t, `[[{"subnet": "10.1.0.0/29"}]]`)[0]
	two := parseSets(t, `[[{"subnet": "10.1.0.0/29", "rangeStart": "10.1.0.2", "rangeEnd": "10.1.0.4"}, {"subnet": "10.2.0.0/30"}]]`)[0]
	divided := parseSets(t, `[[{"subnet": "10.1.0.0/29", "rangeEnd": "10.1.0.3", "gateway": "10.1.0.5"}, {"subnet": "10.1.0.0/29", "rangeStart": "10.1.0.4"}]]`)[0]
	v6 := parseSets(t, `[[{"subnet": "fd00::/126"}]]`)[0]
	top := parseSets(t, `[[{"subnet": "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffc/126"}]]`)[0]

	tests := []struct {
		name string
		set  RangeSet
		last string // the zero Addr if empty
		want string
	}{
		{"from the front", single, "", "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6"},
		{"on from last, which comes at the end", single, "10.1.0.4", "10.1.0.5 10.1.0.6 10.1.0.2 10.1.0.3 10.1.0.4"},
		{"last is the end", single, "10.1.0.6", "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6"},
		{"last is the start, a gateway", single, "10.1.0.1", "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6"},
		{"last is outside", single, "10.9.0.1", "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6"},
		{"last is of another family", single, "fd00::2", "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6"},
		{"two ranges", two, "", "10.1.0.2 10.1.0.3 10.1.0.4 10.2.0.2"},
		{"two ranges, within the first", two, "10.1.0.3", "10.1.0.4 10.2.0.2 10.1.0.2 10.1.0.3"},
		{"two ranges, at the seam", two, "10.1.0.4", "10.2.0.2 10.1.0.2 10.1.0.3 10.1.0.4"},
		{"two ranges, at the end", two, "10.2.0.2", "10.1.0.2 10.1.0.3 10.1.0.4 10.2.0.2"},
		{"gateway of one range inside another", divided, "", "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.6"},
		{"v6 has no broadcast", v6, "", "fd00::2 fd00::3"},
		{"last address there is", top, "", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
		{"after the last address there is", top, "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var last netip.Addr
			if tt.last != "" {
				last = netip.MustParseAddr(tt.last)
			}
			var got []string
			for addr := range tt.set.candidates(last, nil) {
				got = append(got, addr.String())
			}
			if joined := strings.Join(got, " "); joined != tt.want {
				t.Errorf("got  %s\nwant %s", joined, tt.want)
			}
		})
	}
}

// The first of 2^64 addresses must be available without listing them all.
func TestCandidatesAreLazy(t *testing.T) {
	for _, last := range []string{"fd00::1", "fd00::ffff:ffff:ffff:ffff"} {
		for addr := range parseSets(t, `[[{"subnet": "fd00::/64"}]]`)[0].candidates(netip.MustParseAddr(last), nil) {
			if want := "fd00::2"; addr.String() != want {
				t.Errorf("after %s comes %s, want %s", last, addr, want)
			}
			break
		}
	}
}

// naive is a simple model of the allocator: it lists the whole set, rotates the list to
// just after last, and takes the first free address.
type naive struct {
	all  []netip.Addr
	last netip.Addr
	held map[netip.Addr]Attachment
}

func newNaive(set RangeSet) *naive {
	n := &naive{held: map[netip.Addr]Attachment{}}
	for _, r := range set {
		for addr := r.Subnet.Addr(); r.Subnet.Contains(addr); addr = addr.Next() {
			if addr.Compare(r.Start) >= 0 && addr.Compare(r.End) <= 0 {
				n.all = append(n.all, addr)
			}
		}
	}
	return n
}

func (n *naive) reserve(a Attachment, gateways map[netip.Addr]bool) (netip.Addr, error) {
	for _, holder := range n.held {
		if holder == a {
			return netip.Addr{}, ErrDuplicate
		}
	}
	turned := n.all
	for i, addr := range n.all {
		if addr == n.last {
			turned = append(append([]netip.Addr{}, n.all[i+1:]...), n.all[:i+1]...)
		}
	}
	for _, addr := range turned {
		if _, taken := n.held[addr]; !taken && !gateways[addr] {
			n.held[addr] = a
			n.last = addr
			return addr, nil
		}
	}
	return netip.Addr{}, ErrExhausted
}

func (n *naive) release(a Attachment) {
	for addr, holder := range n.held {
		if holder == a {
			delete(n.held, addr)
		}
	}
}

func parseSets(t testing.TB, ranges string) []RangeSet {
	t.Helper()
	return parse(t, "net", fmt.Sprintf(`{"ranges": %s}`, ranges), Request{}).Ranges
}
