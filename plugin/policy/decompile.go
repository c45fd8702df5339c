package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/maps"
)

// Decompiled is a rule as the datapath has it, in the words of the key. Where two rules of a policy admit
// the same, the first one has it.
type Decompiled struct {
	Rule  string            `json:"rule,omitempty"`  // such as policy.egress[1] or shop/web egress[1]; "": the policy implies it
	Peers []DecompiledPeer  `json:"peers,omitempty"` // none: any but the own node
	Ports []DecompiledPorts `json:"ports,omitempty"` // none: every protocol

	number uint32
}

// DecompiledPeer is a kind of peers.
type DecompiledPeer struct {
	Outside bool           `json:"outside,omitempty"` // no container of this host, and not the own node
	Network string         `json:"network,omitempty"`
	Class   uint32         `json:"class,omitempty"` // of the peer's address
	Pods    []string       `json:"pods,omitempty"`  // the selectors by which a NetworkPolicy names that class
	CIDR    string         `json:"cidr,omitempty"`
	Except  []netip.Prefix `json:"except,omitempty"`
}

// String returns the peer in words.
func (p DecompiledPeer) String() string {
	switch {
	case p.Outside:
		return "outside"
	case p.Network != "":
		return "network " + p.Network
	case len(p.Pods) > 0:
		return strings.Join(p.Pods, ", ")
	case p.Class != 0:
		return fmt.Sprintf("class %d", p.Class)
	}
	text := p.CIDR
	for i, except := range p.Except {
		text += map[bool]string{true: " except ", false: " "}[i == 0] + except.String()
	}
	return text
}

// DecompiledPorts are a range of ports.
type DecompiledPorts struct {
	Protocol string `json:"protocol"`
	Port     uint16 `json:"port,omitempty"` // 0: all
	EndPort  uint16 `json:"endPort,omitempty"`
}

// String returns the range like that of a host port: 80-90/tcp.
func (p DecompiledPorts) String() string {
	switch {
	case p.Port == 0:
		return p.Protocol
	case p.EndPort == 0:
		return fmt.Sprintf("%d/%s", p.Port, p.Protocol)
	}
	return fmt.Sprintf("%d-%d/%s", p.Port, p.EndPort, p.Protocol)
}

// Decompile returns the rules of a rule set, in the order of the policy.
func Decompile(set *maps.RuleSet, rules Namer, nameOf func(maps.Network) string) []Decompiled {
	d := newDecompiler(set)
	for _, g := range d.grants {
		switch g.kind {
		case maps.OutsidePeer:
			d.add(g, DecompiledPeer{Outside: true})
		case maps.NetworkPeer:
			d.add(g, DecompiledPeer{Network: nameOf(maps.Network(g.peer))})
		case maps.ClassPeer:
			d.add(g, DecompiledPeer{Class: g.peer})
		case maps.BlockPeer:
			d.addBlocks(g)
		default:
			d.add(g)
		}
	}
	for i := range d.rules {
		d.rules[i].Rule = rules.name(d.rules[i].number)
	}
	return d.rules
}

// grant is what one rule of the policy admits to one peer.
type grant struct {
	number uint32 // of the rule
	kind   maps.PeerKind
	peer   uint32
	ports  []maps.Rule // of which only protocol and ports count: sorted, without overlaps
}

type decompiler struct {
	grants []*grant               // sorted by number
	blocks []block                // each before those in it
	union  map[uint32][]maps.Rule // the ports that a block admits, by the block's number
	rules  []Decompiled
}

type block struct {
	maps.Block
	around int // the smallest block around it; -1: none
}

func newDecompiler(set *maps.RuleSet) *decompiler {
	d := &decompiler{union: map[uint32][]maps.Rule{}, rules: []Decompiled{}}
	byGrant := map[grantKey]*grant{}
	for _, rule := range set.Rules {
		key := grantKey{rule.Number, rule.Kind, rule.Peer}
		if byGrant[key] == nil {
			byGrant[key] = &grant{number: rule.Number, kind: rule.Kind, peer: rule.Peer}
			d.grants = append(d.grants, byGrant[key])
		}
		byGrant[key].ports = append(byGrant[key].ports, rule)
		if rule.Kind == maps.BlockPeer {
			d.union[rule.Peer] = append(d.union[rule.Peer], rule)
		}
	}
	for _, g := range d.grants {
		g.ports = merged(g.ports)
	}
	for number, ports := range d.union {
		d.union[number] = merged(ports)
	}
	slices.SortFunc(d.grants, func(a, b *grant) int {
		return cmp.Or(cmp.Compare(a.number, b.number), cmp.Compare(a.kind, b.kind), cmp.Compare(a.peer, b.peer))
	})
	d.nest(set.Blocks)
	return d
}

type grantKey struct {
	number uint32
	kind   maps.PeerKind
	peer   uint32
}

// nest finds the block around each block. Normalized blocks are sorted: each before those in it.
func (d *decompiler) nest(blocks []maps.Block) {
	around := -1
	for i, b := range blocks {
		for around >= 0 && !contains(blocks[around].Prefix, b.Prefix) {
			around = d.blocks[around].around
		}
		d.blocks = append(d.blocks, block{b, around})
		around = i
	}
}

// merged joins ports that overlap or follow each other.
func merged(ports []maps.Rule) (all []maps.Rule) {
	slices.SortFunc(ports, func(a, b maps.Rule) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.First, b.First))
	})
	for _, p := range ports {
		p = maps.Rule{Protocol: p.Protocol, First: p.First, Last: p.Last}
		if last := len(all) - 1; last >= 0 && all[last].Protocol == p.Protocol && int(p.First) <= int(all[last].Last)+1 {
			all[last].Last = max(all[last].Last, p.Last)
			continue
		}
		all = append(all, p)
	}
	return all
}

// add adds peers of a grant's rule.
func (d *decompiler) add(g *grant, peers ...DecompiledPeer) {
	ports := portsOf(g.ports)
	if last := len(d.rules) - 1; last >= 0 && len(peers) > 0 && d.rules[last].number == g.number &&
		len(d.rules[last].Peers) > 0 && slices.Equal(d.rules[last].Ports, ports) {
		d.rules[last].Peers = append(d.rules[last].Peers, peers...)
		return
	}
	d.rules = append(d.rules, Decompiled{Peers: peers, Ports: ports, number: g.number})
}

func portsOf(ports []maps.Rule) (words []DecompiledPorts) {
	for _, p := range ports {
		word := DecompiledPorts{Protocol: maps.Protocol(p.Protocol).String()}
		switch {
		case p.Protocol == 0:
			return nil
		case p.First == 0 && p.Last == lastPort:
		case p.First == p.Last:
			word.Port = p.First
		default:
			word.Port, word.EndPort = p.First, p.Last
		}
		words = append(words, word)
	}
	return words
}

// addBlocks adds the largest blocks that a grant admits, with the blocks in them that its ports do not reach.
func (d *decompiler) addBlocks(g *grant) {
	for i, b := range d.blocks {
		if b.Number == g.peer && !d.isCovered(b, g) {
			d.add(g, DecompiledPeer{CIDR: b.Prefix.String(), Except: d.exceptions(i, g)})
		}
	}
}

// isCovered reports whether the same rule admits a block around b, and nothing between excepts b.
func (d *decompiler) isCovered(b block, g *grant) bool {
	for b.around >= 0 {
		if b = d.blocks[b.around]; !d.admits(b, g.ports) {
			return false
		}
		isSame := func(other *grant) bool {
			return other.number == g.number && other.kind == maps.BlockPeer && other.peer == b.Number && slices.Equal(other.ports, g.ports)
		}
		if slices.ContainsFunc(d.grants, isSame) {
			return true
		}
	}
	return false
}

func (d *decompiler) exceptions(outer int, g *grant) (except []netip.Prefix) {
	for _, b := range d.blocks[outer+1:] {
		if !contains(d.blocks[outer].Prefix, b.Prefix) {
			break
		}
		isInOther := len(except) > 0 && contains(except[len(except)-1], b.Prefix)
		if !isInOther && !d.admits(b, g.ports) {
			except = append(except, b.Prefix)
		}
	}
	return except
}

// admits reports whether any rules admit a block to the ports.
func (d *decompiler) admits(b block, ports []maps.Rule) bool {
	return !slices.ContainsFunc(ports, func(wanted maps.Rule) bool {
		return !slices.ContainsFunc(d.union[b.Number], func(p maps.Rule) bool {
			return p.Protocol == 0 || p.Protocol == wanted.Protocol && p.First <= wanted.First && wanted.Last <= p.Last
		})
	})
}
