package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
)

const lastPort = 65535

// MaxEntries limits the map entries of a direction: all containers of a host share the maps, and this
// many take some MB. 10,000 rules with a CIDR and a port each fit.
const MaxEntries = 1 << 15

// maxNested limits the pairs of a prefix and a CIDR around it, which cost time and memory.
const maxNested = 1 << 20

// Compile returns the rule sets of a container in a network. nil: the direction is not isolated.
func (p *Policy) Compile(network string) (ingress, egress *maps.RuleSet) {
	ingress, _ = p.CompileRules(p.Ingress, network)
	egress, _ = p.CompileRules(p.Egress, network)
	return ingress, egress
}

// CompileRules returns the rule set of a direction. fits is false if it has too many entries; it is then incomplete.
func (p *Policy) CompileRules(rules []Rule, network string) (set *maps.RuleSet, fits bool) {
	if rules == nil && !p.Internal && p.Host {
		return nil, true
	}
	c := &compiler{
		set:     &maps.RuleSet{Host: p.Host},
		network: maps.NetworkToken(network),
		rules:   rules,
		room:    MaxEntries,
	}
	anyPeer := maps.Rule{Kind: maps.AnyPeer}
	if p.Internal {
		anyPeer = maps.Rule{Kind: maps.NetworkPeer, Peer: uint32(c.network)}
	}
	if rules == nil {
		c.add(anyPeer, nil)
	}
	for i, rule := range rules {
		if len(rule.Peers) == 0 {
			c.addNumbered(anyPeer, i)
		}
		for _, peer := range rule.Peers {
			c.addPeer(peer, i)
		}
	}
	c.addBlocks()
	c.set.Normalize()
	return c.set, c.room >= 0
}

// compiler collects the rule set of one direction.
type compiler struct {
	set     *maps.RuleSet
	network maps.Network
	rules   []Rule
	cidrs   []cidr
	room    int // entries that may follow; negative: too many
}

// cidr is a peer of a rule.
type cidr struct {
	Peer
	rule int
}

func (c *compiler) addPeer(peer Peer, rule int) {
	switch {
	case peer.CIDR.IsValid():
		c.cidrs = append(c.cidrs, cidr{peer, rule})
	case peer.Classes != nil:
		for _, class := range peer.Classes {
			c.addNumbered(maps.Rule{Kind: maps.ClassPeer, Peer: class}, rule)
		}
	case peer.SameNetwork:
		c.addNumbered(maps.Rule{Kind: maps.NetworkPeer, Peer: uint32(c.network)}, rule)
	default:
		c.addNumbered(maps.Rule{Kind: maps.NetworkPeer, Peer: uint32(maps.NetworkToken(peer.Network))}, rule)
	}
}

// addNumbered adds a peer of the rule with that index.
func (c *compiler) addNumbered(peer maps.Rule, rule int) {
	peer.Number = uint32(rule) + 1
	c.add(peer, c.rules[rule].Ports)
}

// add adds one rule for each range of ports, or one for every protocol.
func (c *compiler) add(peer maps.Rule, ports []Ports) {
	if len(ports) == 0 {
		ports = []Ports{{Protocol: 0, Last: lastPort}}
	}
	for _, p := range ports {
		if c.room -= len(maps.PortPrefixes(p.First, p.Last)); c.room < 0 {
			return
		}
		peer.Protocol, peer.First, peer.Last = uint8(p.Protocol), p.First, p.Last
		c.set.Rules = append(c.set.Rules, peer)
	}
}

// addBlocks adds a block for each CIDR and each exception. Prefixes nest, so the longest one that contains an
// address stands for all CIDRs around it: it admits what any of their rules does. CIDRs of the same rules share a
// number, which makes one rule of a list of CIDRs.
func (c *compiler) addBlocks() {
	numbers := map[string]uint32{"[]": 0} // by the indexes of the rules that admit a block
	var around []*nested                  // the current prefix, and those that contain it
	pairs := 0
	for _, inner := range c.nested() {
		for len(around) > 0 && !contains(around[len(around)-1].prefix, inner.prefix) {
			around = around[:len(around)-1]
		}
		if len(around) > 0 {
			inner.inherit(around[len(around)-1])
		}
		around = append(around, inner)
		rules := c.rulesOf(inner.within)
		number, ok := numbers[fmt.Sprint(rules)]
		if !ok {
			number = uint32(len(numbers))
			numbers[fmt.Sprint(rules)] = number
			for _, rule := range rules {
				c.addNumbered(maps.Rule{Kind: maps.BlockPeer, Peer: number}, rule)
			}
		}
		if pairs += len(inner.within); pairs > maxNested {
			c.room = 0
		}
		if c.room--; c.room < 0 {
			return
		}
		c.set.Blocks = append(c.set.Blocks, maps.Block{Prefix: inner.prefix, Number: number})
	}
}

// nested is a prefix that is a CIDR, an exception, or both.
type nested struct {
	prefix netip.Prefix
	within []int // the CIDRs, by index, that have its addresses
	except []int // the CIDRs that except it, sorted
}

// nested returns the prefixes of all CIDRs, each before those that it contains.
func (c *compiler) nested() []*nested {
	found := map[netip.Prefix]*nested{}
	at := func(prefix netip.Prefix) *nested {
		if found[prefix] == nil {
			found[prefix] = &nested{prefix: prefix}
		}
		return found[prefix]
	}
	for i, cidr := range c.cidrs {
		at(cidr.CIDR).within = append(at(cidr.CIDR).within, i)
		for _, except := range cidr.Except {
			at(except).except = append(at(except).except, i)
		}
		if contains(cidr.CIDR, mappedIPv4) {
			at(allIPv4) // else an IPv4 address would be in this block, as the maps write it
		}
	}
	var sorted []*nested
	for _, n := range found {
		sorted = append(sorted, n)
	}
	slices.SortFunc(sorted, func(a, b *nested) int { return a.prefix.Compare(b.prefix) })
	return sorted
}

var (
	allIPv4    = netip.MustParsePrefix("0.0.0.0/0")
	mappedIPv4 = netip.MustParsePrefix("::ffff:0.0.0.0/96")
)

// inherit adds the CIDRs around n, except those that except it.
func (n *nested) inherit(outer *nested) {
	for _, cidr := range outer.within {
		if _, isExcepted := slices.BinarySearch(n.except, cidr); !isExcepted {
			n.within = append(n.within, cidr)
		}
	}
}

// rulesOf returns the indexes of the rules that CIDRs are peers of.
func (c *compiler) rulesOf(cidrs []int) []int {
	var rules []int
	for _, i := range cidrs {
		rules = append(rules, c.cidrs[i].rule)
	}
	slices.Sort(rules)
	return slices.Compact(rules)
}

// contains reports whether inner is a part of outer, or the same.
func contains(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}
