package policies

import (
	"maps"
	"net/netip"
	"slices"

	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
)

// addBlocks adds a block for each prefix whose addresses the rules treat differently than those of the smallest other prefix
// that contains it.
func (t *tiered) addBlocks() {
	const most = 1 << 24 // comparisons

	type block struct {
		prefix netip.Prefix
		made   *outcome
	}
	nodes, prefixes := t.prefixes()
	comparisons := 0
	for _, s := range t.steps {
		comparisons += 1 + len(s.nodes)
		for _, block := range s.blocks {
			comparisons += 1 + len(block.Except)
		}
	}
	if len(prefixes)*comparisons > most {
		t.room = -1
		return
	}
	numbers := map[*outcome]uint32{}
	var around []block // the current prefix, and those that contain it
	for _, prefix := range prefixes {
		node, isNode := nodes[prefix]
		made := t.outcomeOf(func(s *step) space {
			if s.number == 0 && isNode && node == t.Node {
				return nil // NetworkPolicies do not isolate a pod from its own node
			}
			return s.ofBlock(prefix)
		})
		if t.isOfPods(prefix) && !isNode {
			made = t.within(made, t.ofAnyPod(prefix))
		}
		for len(around) > 0 && !contains(around[len(around)-1].prefix, prefix) {
			around = around[:len(around)-1]
		}
		if len(around) > 0 && around[len(around)-1].made == made {
			continue
		}
		around = append(around, block{prefix, made})
		if numbers[made] == 0 {
			numbers[made] = uint32(len(numbers) + 1)
			t.add(ebpfmaps.Rule{Kind: ebpfmaps.BlockPeer, Peer: numbers[made]}, made)
		}
		if t.room--; t.room < 0 {
			return
		}
		t.set.Blocks = append(t.set.Blocks, ebpfmaps.Block{Prefix: prefix, Number: numbers[made]})
	}
}

// prefixes returns those of all rules, pods, and nodes, each before those that it contains, and the names of these nodes.
func (t *tiered) prefixes() (nodes map[netip.Prefix]string, sorted []netip.Prefix) {
	nodes = map[netip.Prefix]string{}
	all := map[netip.Prefix]bool{netip.MustParsePrefix("0.0.0.0/0"): true, netip.MustParsePrefix("::/0"): true}
	for _, s := range t.steps {
		for _, block := range s.blocks {
			all[block.CIDR] = true
			for _, except := range block.Except {
				all[except] = true
			}
		}
	}
	for _, prefix := range t.ranges {
		all[prefix] = true
	}
	for _, node := range t.nodes {
		for _, addr := range node.Addresses {
			prefix := netip.PrefixFrom(addr, addr.BitLen())
			nodes[prefix], all[prefix] = node.Name, true
		}
	}
	return nodes, slices.SortedFunc(maps.Keys(all), netip.Prefix.Compare)
}

// isOfPods reports whether pods may have the addresses.
func (c *Compiler) isOfPods(prefix netip.Prefix) bool {
	return slices.ContainsFunc(c.ranges, func(r netip.Prefix) bool { return contains(r, prefix) })
}

func contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// findRanges finds the prefixes that pods have addresses of: those of the nodes, and what is around other addresses.
func (c *Compiler) findRanges() {
	const around4, around6 = 24, 64

	found := map[netip.Prefix]bool{}
	for _, node := range c.nodes {
		for _, prefix := range node.PodCIDRs {
			found[prefix] = true
		}
	}
	before := c.ranges
	c.ranges = merged(found)
	for addr := range c.holders {
		if bits := map[bool]int{true: around4, false: around6}[addr.Is4()]; !c.isOfPods(netip.PrefixFrom(addr, addr.BitLen())) {
			found[netip.PrefixFrom(addr, bits).Masked()] = true
		}
	}
	if c.ranges = merged(found); !slices.Equal(before, c.ranges) {
		c.rules = map[string]*Rules{}
	}
}

// merged returns the fewest prefixes that have the same addresses, sorted.
func merged(all map[netip.Prefix]bool) (fewest []netip.Prefix) {
	for _, prefix := range slices.SortedFunc(maps.Keys(all), netip.Prefix.Compare) {
		last := len(fewest) - 1
		if last >= 0 && contains(fewest[last], prefix) {
			continue
		}
		for ; last >= 0 && areHalves(fewest[last], prefix); last-- {
			prefix, fewest = outerOf(prefix), fewest[:last]
		}
		fewest = append(fewest, prefix)
	}
	return fewest
}

func areHalves(a, b netip.Prefix) bool {
	return a.Bits() == b.Bits() && a != b && outerOf(a) == outerOf(b)
}

func outerOf(prefix netip.Prefix) netip.Prefix {
	return netip.PrefixFrom(prefix.Addr(), prefix.Bits()-1).Masked()
}
