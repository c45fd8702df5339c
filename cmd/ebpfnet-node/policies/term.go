package policies

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// term is a set of pods that rules name.
type term struct {
	key      string              // equal for equal sets
	sum      [16]byte            // of the key
	selector *nodestate.Selector // nil: the term is no selector of a rule
	matches  func(pod *Pod, namespace labels.Set, addr netip.Addr) bool
	isPeer   bool              // a rule admits all of them
	named    map[portName]bool // ports that rules admit to them; a pod has its own number
}

func ownNamespaceTerm(namespace string, pods labels.Selector) term {
	selector := nodestate.Selector{Namespace: namespace, Labels: pods.String()}
	return term{key: selector.String(), selector: &selector, matches: func(pod *Pod, _ labels.Set, _ netip.Addr) bool {
		return pod.Namespace == namespace && pods.Matches(pod.Labels)
	}}
}

func namespacesTerm(namespaces, pods labels.Selector) term {
	selector := nodestate.Selector{Namespaces: namespaces.String(), Labels: pods.String()}
	return term{key: selector.String(), selector: &selector, matches: func(pod *Pod, namespace labels.Set, _ netip.Addr) bool {
		return namespace != nil && namespaces.Matches(namespace) && pods.Matches(pod.Labels)
	}}
}

func blockTerm(block policy.Peer) term {
	return term{key: fmt.Sprintf("block %s except %s", block.CIDR, block.Except), matches: func(_ *Pod, _ labels.Set, addr netip.Addr) bool {
		return block.CIDR.Contains(addr) && !slices.ContainsFunc(block.Except, func(p netip.Prefix) bool { return p.Contains(addr) })
	}}
}

func anyTerm() term {
	return term{key: "any", matches: func(*Pod, labels.Set, netip.Addr) bool { return true }}
}

// term returns the term of all rules that is equal.
func (p *parser) term(t term) *term {
	if known := p.terms[t.key]; known != nil {
		return known
	}
	sum := sha256.Sum256([]byte(t.key))
	t.sum = [16]byte(sum[:])
	p.terms[t.key] = &t
	return &t
}

// admitsPeers reports whether the rule admits peers by all that it names, and not only by named ports of theirs.
func (r *rule) admitsPeers() bool { return r.anyPort || len(r.ports) > 0 || len(r.holders) == 0 }

// peersOf returns the terms that a rule of the policy names as peers. Where rules deny, prefixes name pods, too.
func (p *parsed) peersOf(r *rule) []*term {
	if p.isTiered {
		return slices.Concat(r.terms, r.blockTerms)
	}
	return r.terms
}

// use notes how the rule uses its terms.
func (p *parsed) use(r *rule) {
	for _, t := range p.peersOf(r) {
		t.isPeer = t.isPeer || r.admitsPeers()
	}
	for _, t := range r.holders {
		for _, name := range r.named {
			t.named[name] = true
		}
	}
}

// termsOf returns the terms of rules, by their keys. The term of any pod is one of them where rules deny.
func termsOf(policies []*parsed, anyPod *term) []*term {
	all := map[string]*term{}
	anyPod.isPeer = false
	add := func(t *term) {
		t.isPeer, t.named = false, map[portName]bool{}
		all[t.key] = t
	}
	each(policies, func(p *parsed, r *rule) {
		for _, t := range slices.Concat(p.peersOf(r), r.holders) {
			add(t)
		}
	})
	if slices.ContainsFunc(policies, func(p *parsed) bool { return p.isTiered }) {
		add(anyPod)
		anyPod.isPeer = true
	}
	each(policies, (*parsed).use)
	return slices.SortedFunc(maps.Values(all), func(a, b *term) int { return cmp.Compare(a.key, b.key) })
}

// each calls do with the policies' rules.
func each(policies []*parsed, do func(*parsed, *rule)) {
	for _, p := range policies {
		for direction := range p.rules {
			for i := range p.rules[direction] {
				do(p, &p.rules[direction][i])
			}
		}
	}
}

// class is the addresses that the terms in use cannot tell apart.
type class struct {
	number uint32
	set    *termSet // those in use when it was new
	in     []uint64 // a bit for each of them
	ports  []NamedPort
	idle   int // compilations since an address had it
}

// termSet is terms in use.
type termSet struct {
	terms []*term
	at    map[[16]byte]int // their places
}

func newTermSet(terms []*term) *termSet {
	set := &termSet{terms, make(map[[16]byte]int, len(terms))}
	for i, t := range terms {
		set.at[t.sum] = i
	}
	return set
}

// has reports whether the class's addresses are in a term.
func (c *class) has(t *term) bool {
	i, ok := c.set.at[t.sum]
	return ok && c.in[i/64]&(1<<(i%64)) != 0
}

// content identifies a class: a hash of what its addresses have in common.
type content [sha256.Size]byte

// classes numbers classes. A number is a part of the content, so it is the same in all runs of the agent.
type classes struct {
	byContent map[content]*class
	numbers   map[uint32]bool
	sorted    []*class
}

// classOf returns what an address has in common with others of its class, as a class without a number; nil: no term matches.
// Of a term that rules use for names of ports only, pods are members that have one.
func (s *termSet) classOf(pod *Pod, namespace labels.Set, addr netip.Addr) (*class, content) {
	var made *class
	sum := sha256.New()
	for i, t := range s.terms {
		if !t.matches(pod, namespace, addr) {
			continue
		}
		ports := pod.portsNamed(t.named)
		if !t.isPeer && len(ports) == 0 {
			continue
		}
		if made == nil {
			made = &class{set: s, in: make([]uint64, (len(s.terms)+63)/64)}
		}
		made.in[i/64] |= 1 << (i % 64)
		for _, port := range ports {
			if !slices.Contains(made.ports, port) {
				made.ports = append(made.ports, port)
			}
		}
		sum.Write(t.sum[:])
		for _, port := range ports {
			fmt.Fprintf(sum, "%q %v %d\n", port.Name, port.Protocol, port.Port)
		}
	}
	return made, content(sum.Sum(nil))
}

// of returns the class with that content, and whether it is new.
func (c *classes) of(made *class, key content) (found *class, isNew bool) {
	if made == nil {
		return nil, false
	}
	if known := c.byContent[key]; known != nil {
		known.set, known.in = made.set, made.in // of the terms that are in use now
		return known, false
	}
	made.number = binary.BigEndian.Uint32(key[:])
	for made.number == 0 || c.numbers[made.number] {
		made.number++
	}
	c.byContent[key], c.numbers[made.number] = made, true
	return made, true
}

// retire forgets classes that no address has any more, when there are many. A class that addresses had at the last
// compilation stays, because the datapath may still have it. It reports whether it has forgotten any.
func (c *classes) retire(used map[*class]bool) bool {
	const tolerated, rounds = 64, 2

	idle := 0
	for _, class := range c.byContent {
		class.idle++
		if used[class] {
			class.idle = 0
		}
		if class.idle >= rounds {
			idle++
		}
	}
	if idle <= tolerated {
		return false
	}
	for content, class := range c.byContent {
		if class.idle >= rounds {
			delete(c.byContent, content)
			delete(c.numbers, class.number)
		}
	}
	return true
}

// selectors returns the selectors of terms in use that match the pods of each class, up to some number: they only explain.
func (c *classes) selectors(terms []*term) map[uint32][]nodestate.Selector {
	const most = 1 << 14

	selectors, all := map[uint32][]nodestate.Selector{}, 0
	for _, class := range c.sorted {
		for _, t := range terms {
			if t.selector == nil || !class.has(t) {
				continue
			}
			if all++; all > most {
				return selectors
			}
			selectors[class.number] = append(selectors[class.number], *t.selector)
		}
	}
	return selectors
}

func (c *classes) sort() {
	c.sorted = slices.SortedFunc(maps.Values(c.byContent), func(a, b *class) int { return cmp.Compare(a.number, b.number) })
}
