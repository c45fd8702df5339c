package maps

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// RuleSet is what one direction of a container admits. A connection is admitted if its peer and its
// destination port match any rule, so rules only add up. The container itself is always admitted.
// A direction that is not isolated has no rule set: nil.
type RuleSet struct {
	Rules  []Rule
	Blocks []Block // the longest prefix that contains the peer's address counts
	Host   bool    // the own node is admitted
	Audit  bool    // what is not admitted is reported, and passes
	Denied []Rule  // what rules deny, for explanations: the maps do not have it
}

// PeerKind says which peers a rule is about.
type PeerKind bpf.PeerKind

// The kinds of peers.
const (
	AnyPeer     = PeerKind(bpf.PeerAny)     // any but the own node, which only Host, a class or a block admits
	OutsidePeer = PeerKind(bpf.PeerOutside) // no container of this host, and not the own node
	NetworkPeer = PeerKind(bpf.PeerNetwork) // containers of this host in one network
	ClassPeer   = PeerKind(bpf.PeerClass)   // the class of the peer's address
	BlockPeer   = PeerKind(bpf.PeerBlock)   // the block of the peer's address, which may be a container's or the own node's
)

// Rule admits connections.
type Rule struct {
	Kind        PeerKind
	Peer        uint32 // the network's token, a class, or the number of a block; else 0
	Protocol    uint8  // 0: any, also one without ports
	First, Last uint16 // destination ports; 0 and 65535: all
	Number      uint32 // of the rule in the policy, to explain a verdict; 0: the policy implies the rule
}

// Block is a part of the address space. Blocks that the same rules admit have the same number.
type Block struct {
	Prefix netip.Prefix
	Number uint32
}

// Normalize sorts rules and blocks and removes duplicates, so that equal content has an equal digest.
func (r *RuleSet) Normalize() {
	sameEntry := func(a, b Rule) bool {
		b.Number = a.Number
		return a == b
	}
	slices.SortFunc(r.Rules, compareRules)
	r.Rules = slices.CompactFunc(r.Rules, sameEntry)
	slices.SortFunc(r.Blocks, func(a, b Block) int {
		return cmp.Or(a.Prefix.Compare(b.Prefix), cmp.Compare(a.Number, b.Number))
	})
	r.Blocks = slices.Compact(r.Blocks)
}

// Entries returns how much room the rule set takes in the maps, as a number of entries of policy_rules. policy_blocks has a quarter of
// these.
func (r *RuleSet) Entries() int {
	const block = 4

	entries := block * len(r.Blocks)
	for _, rule := range r.Rules {
		entries += len(ruleKeys(0, rule))
	}
	return entries
}

func compareRules(a, b Rule) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Peer, b.Peer), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last), cmp.Compare(a.Number, b.Number))
}

// Digest identifies the rules and blocks of a normalized rule set. It leaves out Host and Audit, which
// are no entries of the set: containers that differ in these can share the entries.
func (r *RuleSet) Digest() [16]byte {
	text := binary.BigEndian.AppendUint32(nil, uint32(len(r.Rules)))
	for _, rule := range r.Rules {
		text = append(text, byte(rule.Kind), rule.Protocol)
		text = binary.BigEndian.AppendUint32(text, rule.Peer)
		text = binary.BigEndian.AppendUint16(text, rule.First)
		text = binary.BigEndian.AppendUint16(text, rule.Last)
		text = binary.BigEndian.AppendUint32(text, rule.Number)
	}
	for _, block := range r.Blocks {
		prefix := mapped(block.Prefix)
		addr := prefix.Addr().As16()
		text = append(append(text, addr[:]...), byte(prefix.Bits()))
		text = binary.BigEndian.AppendUint32(text, block.Number)
	}
	sum := sha256.Sum256(text)
	return [16]byte(sum[:])
}

// PortPrefix is all ports that begin with the first Bits bits of Port.
type PortPrefix struct {
	Port uint16
	Bits uint8
}

// PortPrefixes returns the fewest prefixes that have exactly the ports from first to last: one for all
// ports, at most 30.
func PortPrefixes(first, last uint16) (prefixes []PortPrefix) {
	const portBits = 16
	for port, end := int(first), int(last)+1; port < end; {
		size := bits.TrailingZeros(uint(port | 1<<portBits)) // as a power of two
		for port+1<<size > end {
			size--
		}
		prefixes = append(prefixes, PortPrefix{uint16(port), uint8(portBits - size)})
		port += 1 << size
	}
	return prefixes
}

// Peer is the other side of a container's connection.
type Peer struct {
	Addr    netip.Addr
	Network Network // of a container of this host; 0: the peer is none
	Class   uint32  // of the address; 0: none
	Host    bool    // the peer is the own node
	Self    bool    // the peer is the container itself
}

// Verdict reports whether the rule set admits a connection, and the number of a rule that does. The
// number is 0 if no rule of the policy admits it. The programs judge by the maps; this explains.
func (r *RuleSet) Verdict(peer Peer, protocol uint8, port uint16) (rule uint32, admitted bool) {
	if r == nil || peer.Self || peer.Host && r.Host {
		return 0, true
	}
	i := slices.IndexFunc(r.rulesFor(peer), func(rule Rule) bool { return rule.hasPort(protocol, port) })
	if i < 0 {
		return 0, false
	}
	return r.rulesFor(peer)[i].Number, true
}

// Denier returns the number of a rule that denies a connection, and whether there is one.
func (r *RuleSet) Denier(peer Peer, protocol uint8, port uint16) (rule uint32, isDenied bool) {
	denies := &RuleSet{Rules: r.Denied, Blocks: r.Blocks}
	return denies.Verdict(Peer{peer.Addr, peer.Network, peer.Class, peer.Host, false}, protocol, port)
}

// Miss says what of a rule does not match a connection.
type Miss uint8

// The misses.
const (
	MissNone Miss = iota // there is no rule to name
	MissPort             // the peer matches, the protocol or port does not
	MissPeer             // the protocol and port match, the peer does not
)

// NearestMiss returns the number of the rule that comes closest to admitting a connection which Verdict does not
// admit, and what does not match. A rule whose peer matches comes closer than one whose port does.
func (r *RuleSet) NearestMiss(peer Peer, protocol uint8, port uint16) (rule uint32, miss Miss) {
	if r == nil {
		return 0, MissNone
	}
	if rules := r.rulesFor(peer); len(rules) > 0 {
		return rules[0].Number, MissPort
	}
	i := slices.IndexFunc(r.Rules, func(rule Rule) bool { return rule.hasPort(protocol, port) })
	if i < 0 {
		return 0, MissNone
	}
	return r.Rules[i].Number, MissPeer
}

// Match is what of a rule matches a connection.
type Match struct {
	Peer, Port bool
	Both       bool // the rule admits the connection
}

// Matches returns what of each rule matches a connection, by the rules' numbers: what it admits, or denies. Of two rules for
// the same, only the first one does.
func (r *RuleSet) Matches(peer Peer, protocol uint8, port uint16) map[uint32]Match {
	matches := map[uint32]Match{}
	block, inBlock := r.blockOf(peer.Addr)
	for _, rule := range slices.Concat(r.Rules, r.Denied) {
		hasPeer, hasPort, match := peer.matches(rule, block, inBlock), rule.hasPort(protocol, port), matches[rule.Number]
		matches[rule.Number] = Match{match.Peer || hasPeer, match.Port || hasPort, match.Both || hasPeer && hasPort}
	}
	return matches
}

// rulesFor returns the rules whose peers a peer is one of.
func (r *RuleSet) rulesFor(peer Peer) (rules []Rule) {
	block, inBlock := r.blockOf(peer.Addr)
	for _, rule := range r.Rules {
		if peer.matches(rule, block, inBlock) {
			rules = append(rules, rule)
		}
	}
	return rules
}

func (p Peer) matches(rule Rule, block uint32, inBlock bool) bool {
	switch rule.Kind {
	case AnyPeer:
		return !p.Host
	case OutsidePeer:
		return !p.Host && p.Network == 0
	case NetworkPeer:
		return p.Network != 0 && rule.Peer == uint32(p.Network)
	case ClassPeer:
		return p.Class != 0 && rule.Peer == p.Class
	case BlockPeer:
		return inBlock && rule.Peer == block
	}
	return false
}

func (r Rule) hasPort(protocol uint8, port uint16) bool {
	return r.Protocol == 0 || r.Protocol == protocol && r.First <= port && port <= r.Last
}

// blockOf returns the number of an address's block, and whether it has one. As in the map, an IPv4
// address is an IPv4-mapped one, which prefixes of IPv6 can contain.
func (r *RuleSet) blockOf(addr netip.Addr) (number uint32, ok bool) {
	if !addr.IsValid() {
		return 0, false
	}
	addr, longest := netip.AddrFrom16(addr.As16()), -1
	for _, block := range r.Blocks {
		if prefix := mapped(block.Prefix); prefix.Bits() > longest && prefix.Contains(addr) {
			number, longest = block.Number, prefix.Bits()
		}
	}
	return number, longest >= 0
}

// Equal reports whether two rule sets admit the same by the same entries; nil equals nil only.
func (r *RuleSet) Equal(other *RuleSet) bool {
	if r == nil || other == nil {
		return r == other
	}
	a, b := r.asEntries(), other.asEntries()
	return r.Host == other.Host && r.Audit == other.Audit && slices.Equal(a.Rules, b.Rules) && slices.Equal(a.Blocks, b.Blocks)
}

// asEntries returns the rule set as the maps have it: a range of ports is one rule for each prefix of it.
func (r *RuleSet) asEntries() *RuleSet {
	split := &RuleSet{Blocks: slices.Clone(r.Blocks)}
	for _, rule := range r.Rules {
		for _, key := range ruleKeys(0, rule) {
			split.Rules = append(split.Rules, ruleOf(key, rule.Number))
		}
	}
	split.Normalize()
	return split
}
