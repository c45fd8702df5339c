package policies

import (
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// The entries of a rule set only admit. So where rules deny, a class or a block has entries for what is left: the compiler asks
// all rules in order what they do with it. An address gets what its class or its block admits. Therefore a block of pods'
// addresses admits only what the rules do of any pod, so also of one that the agent does not know yet.

// defaultRule admits what no policy decides.
var defaultRule = &rule{name: "the default", anyPeer: true, anyPort: true}

// portless are protocols without ports that have entries where not all protocols are admitted: ICMP, IP in IP, GRE, and IPsec.
var portless = [...]ebpfmaps.Protocol{ebpfmaps.ICMP, ebpfmaps.ICMPv6, 4, 41, 47, 50, 51}

// step is a rule of the tiers, in the order in which they decide.
type step struct {
	*rule
	tier   tier
	number uint32 // of the rule; 0: a NetworkPolicy isolates the pod, so its tier ends
	ports  space  // but for those that a peer has the numbers for
	nodes  []netip.Addr
}

// outcome is what the rules do with connections of a peer.
type outcome struct {
	admits, denies []grant
}

// grant is what one rule decides.
type grant struct {
	number uint32
	ports  space
}

// admitted returns what all of the rules admit.
func (o *outcome) admitted() (all space) {
	for _, g := range o.admits {
		all = all.plus(g.ports)
	}
	return all
}

// within returns the outcome without what is not in a space.
func (t *tiered) within(o *outcome, limit space) *outcome {
	if len(o.admitted().minus(limit)) == 0 {
		return o
	}
	key := fmt.Sprintf("%p %v", o, limit)
	if t.all[key] == nil {
		made := &outcome{denies: o.denies}
		for _, g := range o.admits {
			if g.ports = g.ports.and(limit); len(g.ports) > 0 {
				made.admits = append(made.admits, g)
			}
		}
		t.all[key] = made
	}
	return t.all[key]
}

// decide asks the steps in order. Each is asked about what is left, of which it matches some.
func decide(steps []step, matched func(*step) space) *outcome {
	made := &outcome{}
	left, passed, at := everything, space(nil), adminTier
	for i := range steps {
		s := &steps[i]
		if s.tier != at {
			left, passed, at = left.plus(passed), nil, s.tier
		}
		hit := left.and(matched(s))
		if len(hit) == 0 {
			continue
		}
		left = left.minus(hit)
		switch s.action {
		case accept:
			made.admits = append(made.admits, grant{s.number, hit})
		case deny:
			made.denies = append(made.denies, grant{s.number, hit})
		case pass:
			passed = passed.plus(hit)
		}
	}
	return made
}

// isTiered reports whether a ClusterNetworkPolicy has rules for the direction.
func isTiered(policies []*parsed, direction int) bool {
	return slices.ContainsFunc(policies, func(p *parsed) bool { return p.tier != namespaceTier && p.isolates[direction] })
}

// tiered compiles one direction of a pod that ClusterNetworkPolicies select.
type tiered struct {
	*Compiler
	steps []step
	set   *ebpfmaps.RuleSet
	from  source
	room  int // entries that may follow; negative: too many
	all   map[string]*outcome
}

// tiered returns the rule set of a direction, and what it comes from. fits is false if it has too many entries.
func (c *Compiler) tiered(pod *Pod, policies []*parsed, direction int) (set *ebpfmaps.RuleSet, from source, fits bool) {
	t := &tiered{Compiler: c, set: &ebpfmaps.RuleSet{Host: true}, room: policy.MaxEntries, all: map[string]*outcome{}}
	t.collect(pod, policies, direction)
	for _, class := range c.classes.sorted {
		t.add(ebpfmaps.Rule{Kind: ebpfmaps.ClassPeer, Peer: class.number}, t.outcomeOf(func(s *step) space { return s.ofClass(class) }))
	}
	t.addBlocks()
	t.set.Normalize()
	return t.set, t.from, t.room >= 0
}

// collect makes the steps.
func (t *tiered) collect(pod *Pod, policies []*parsed, direction int) {
	isolation := denyAll("")
	isIsolated := false
	add := func(s step) {
		t.from.rules = append(t.from.rules, s.rule)
		s.number = uint32(len(t.from.rules))
		t.steps = append(t.steps, s)
	}
	isolate := func() {
		if isIsolated {
			t.steps = append(t.steps, step{rule: &isolation, tier: namespaceTier, ports: everything})
			isIsolated = false
		}
	}
	for _, p := range policies { // sorted by tiers
		if p.tier == baselineTier {
			isolate()
		}
		if !p.isolates[direction] {
			continue
		}
		isIsolated = isIsolated || p.tier == namespaceTier
		t.from.policies = append(t.from.policies, p.String())
		for i := range p.rules[direction] {
			r := &p.rules[direction][i]
			s := step{rule: r, tier: p.tier, ports: spaceOf(r.ports), nodes: t.nodesOf(r)}
			if r.anyPort {
				s.ports = everything
			}
			if r.action == deny && t.namesOwnNode(r) {
				t.set.Host = false // so its blocks decide
			}
			if direction == ingress {
				for _, name := range r.named {
					s.ports = s.ports.plus(spaceOf(name.numbers(pod.Ports)))
				}
			}
			add(s)
		}
	}
	isolate()
	add(step{rule: defaultRule, tier: baselineTier + 1, ports: everything})
}

// namesOwnNode reports whether a rule's selectors of nodes match the pods' own one, which rules do not deny otherwise.
func (c *Compiler) namesOwnNode(r *rule) bool {
	return slices.ContainsFunc(c.nodes, func(node Node) bool { return node.Name == c.Node && r.names(node) })
}

func (r *rule) names(node Node) bool {
	return slices.ContainsFunc(r.nodes, func(s labels.Selector) bool { return s.Matches(node.Labels) })
}

// nodesOf returns the addresses of the nodes that a rule names.
func (c *Compiler) nodesOf(r *rule) (addrs []netip.Addr) {
	for _, node := range c.nodes {
		if r.names(node) {
			addrs = append(addrs, node.Addresses...)
		}
	}
	return addrs
}

// ofClass returns what the step matches of a class of pods.
func (s *step) ofClass(class *class) space {
	ports := s.ports
	if named := class.portsFor(s.rule); len(named) > 0 {
		ports = ports.plus(spaceOf(named))
	}
	if s.anyPeer || slices.ContainsFunc(s.terms, class.has) || slices.ContainsFunc(s.blockTerms, class.has) {
		return ports
	}
	return nil
}

// hasBlock reports whether the step matches the addresses, whoever has them.
func (s *step) hasBlock(prefix netip.Prefix) bool {
	isIn := func(p netip.Prefix) bool { return p.Bits() <= prefix.Bits() && p.Contains(prefix.Addr()) }
	has := func(block policy.Peer) bool { return isIn(block.CIDR) && !slices.ContainsFunc(block.Except, isIn) }
	return s.anyPeer || slices.ContainsFunc(s.blocks, has) || prefix.IsSingleIP() && slices.Contains(s.nodes, prefix.Addr())
}

// ofBlock returns what the step matches of addresses that are no pods'.
func (s *step) ofBlock(prefix netip.Prefix) space {
	if s.hasBlock(prefix) {
		return s.ports
	}
	return nil
}

// ofAnyPod returns what the steps admit of each pod that may have the addresses, whatever its labels and names of ports.
func (t *tiered) ofAnyPod(prefix netip.Prefix) space {
	var denied, passed space
	left, at := everything, adminTier // what may be left
	for i := range t.steps {
		s := &t.steps[i]
		if s.tier != at {
			left, passed, at = left.plus(passed), nil, s.tier
		}
		hit, sure := space(nil), s.ofBlock(prefix)
		switch isHit := len(s.terms) > 0 || s.hasBlock(prefix); {
		case isHit && len(s.holders) > 0: // the port of a name may be any
			hit = left
		case isHit:
			hit = left.and(s.ports)
		}
		switch s.action {
		case deny:
			denied = denied.plus(hit)
		case pass:
			passed = passed.plus(hit)
		}
		left = left.minus(sure)
	}
	return denied.complement()
}

// outcomeOf is decide, once for all peers of which the steps match the same.
func (t *tiered) outcomeOf(matched func(*step) space) *outcome {
	spaces := make([]space, len(t.steps))
	for i := range t.steps {
		spaces[i] = matched(&t.steps[i])
	}
	key := fmt.Sprint(spaces)
	if t.all[key] == nil {
		i := 0
		t.all[key] = decide(t.steps, func(*step) space { i++; return spaces[i-1] })
	}
	return t.all[key]
}

// add adds the entries of a class or a block.
func (t *tiered) add(peer ebpfmaps.Rule, o *outcome) {
	isAll := o.admitted().isEverything()
	for _, g := range o.admits {
		peer.Number = g.number
		if g.ports.hasOthers() && isAll { // the entries of other rules are longer
			t.addTo(&t.set.Rules, peer, policy.Ports{Last: lastPort})
		} else if g.ports.hasOthers() {
			for _, protocol := range portless {
				t.addTo(&t.set.Rules, peer, policy.Ports{Protocol: protocol, Last: lastPort})
			}
		}
		if g.ports.isEverything() {
			continue
		}
		for _, ports := range g.ports.ports() {
			t.addTo(&t.set.Rules, peer, ports)
		}
	}
	const most = 1 << 12 // they only explain
	for _, g := range o.denies {
		if peer.Number = g.number; g.number == 0 || len(t.set.Denied) > most {
			continue
		}
		if g.ports.hasOthers() {
			t.set.Denied = append(t.set.Denied, withPortsOf(peer, policy.Ports{Last: lastPort}))
		}
		for _, ports := range g.ports.ports() {
			t.set.Denied = append(t.set.Denied, withPortsOf(peer, ports))
		}
	}
}

func (t *tiered) addTo(rules *[]ebpfmaps.Rule, peer ebpfmaps.Rule, ports policy.Ports) {
	if t.room -= len(ebpfmaps.PortPrefixes(ports.First, ports.Last)); t.room >= 0 {
		*rules = append(*rules, withPortsOf(peer, ports))
	}
}

func withPortsOf(peer ebpfmaps.Rule, ports policy.Ports) ebpfmaps.Rule {
	peer.Protocol, peer.First, peer.Last = uint8(ports.Protocol), ports.First, ports.Last
	return peer
}
