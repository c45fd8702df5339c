package maps

import (
	"net/netip"
	"slices"
	"testing"
)

// TestPortPrefixes wants prefixes that have each port of a range once, and no other.
func TestPortPrefixes(t *testing.T) {
	for _, test := range []struct {
		first, last uint16
		want        int
	}{
		{0, 65535, 1}, {1, 65535, 16}, {1, 65534, 30}, {0, 0, 1}, {65535, 65535, 1}, {80, 80, 1}, {80, 90, 3}, {1024, 65535, 6}, {32768, 65535, 1}, {8, 7, 0},
	} {
		prefixes := PortPrefixes(test.first, test.last)
		if len(prefixes) != test.want {
			t.Errorf("%d to %d: got %d prefixes, want %d", test.first, test.last, len(prefixes), test.want)
		}
		for port := range 1 << 16 {
			matching := 0
			for _, prefix := range prefixes {
				if (port^int(prefix.Port))>>(16-prefix.Bits) == 0 {
					matching++
				}
			}
			if isIn := int(test.first) <= port && port <= int(test.last); isIn && matching != 1 || !isIn && matching != 0 {
				t.Fatalf("%d to %d: %d prefixes have port %d", test.first, test.last, matching, port)
			}
		}
	}
}

// TestDigest wants one digest for equal content in any order, and another one for each difference.
func TestDigest(t *testing.T) {
	digest := func(rules []Rule, blocks ...Block) [16]byte {
		set := RuleSet{Rules: slices.Clone(rules), Blocks: slices.Clone(blocks)}
		set.Normalize()
		return set.Digest()
	}
	web, dns := Rule{Protocol: uint8(TCP), First: 80, Last: 90, Number: 1}, Rule{Kind: BlockPeer, Peer: 1, Protocol: uint8(UDP), First: 53, Last: 53, Number: 2}
	later, block := web, Block{netip.MustParsePrefix("10.0.0.0/8"), 1}
	later.Number = 3
	want := digest([]Rule{web, dns}, block)
	if got := digest([]Rule{dns, later, web, dns}, block, block); got != want {
		t.Errorf("other order, and duplicates: got %x, want %x", got, want)
	}
	seen := map[[16]byte]int{want: -1}
	for i, change := range []func(*Rule, *Block){
		func(r *Rule, _ *Block) { r.Kind = OutsidePeer },
		func(r *Rule, _ *Block) { r.Peer = 1 },
		func(r *Rule, _ *Block) { r.Protocol = uint8(SCTP) },
		func(r *Rule, _ *Block) { r.First = 81 },
		func(r *Rule, _ *Block) { r.Last = 91 },
		func(r *Rule, _ *Block) { r.Number = 3 },
		func(_ *Rule, b *Block) { b.Number = 2 },
		func(_ *Rule, b *Block) { b.Prefix = netip.MustParsePrefix("10.0.0.0/9") },
		func(_ *Rule, b *Block) { b.Prefix = netip.MustParsePrefix("a00::/8") },
	} {
		rule, changed := web, block
		change(&rule, &changed)
		got := digest([]Rule{rule, dns}, changed)
		if other, ok := seen[got]; ok {
			t.Errorf("change %d: got the digest of %d", i, other)
		}
		seen[got] = i
	}
}
