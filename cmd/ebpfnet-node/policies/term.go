package policies

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// term is a set of pods that rules name.
type term struct {
	key      string              // equal for equal sets
	selector *nodestate.Selector // nil: the term is no selector of a rule
	matches  func(pod *Pod, namespace labels.Set, addr netip.Addr) bool
	isPeer   bool       // a rule admits all of them
	named    []portName // ports that rules admit to them; a pod has its own number
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
	p.terms[t.key] = &t
	return &t
}

// admitsPeers reports whether the rule admits peers by all that it names, and not only by named ports of theirs.
func (r *rule) admitsPeers() bool { return r.anyPort || len(r.ports) > 0 || len(r.holders) == 0 }

// use notes how the rule uses its terms.
func (r *rule) use() {
	for _, t := range r.terms {
		t.isPeer = t.isPeer || r.admitsPeers()
	}
	for _, t := range r.holders {
		for _, name := range r.named {
			if !slices.Contains(t.named, name) {
				t.named = append(t.named, name)
			}
		}
	}
}

// termsOf returns the terms of rules, by their keys.
func termsOf(policies []*parsed) []*term {
	all := map[string]*term{}
	var rules []*rule
	for _, p := range policies {
		for direction := range p.rules {
			for i := range p.rules[direction] {
				rules = append(rules, &p.rules[direction][i])
			}
		}
	}
	for _, r := range rules {
		for _, t := range slices.Concat(r.terms, r.holders) {
			t.isPeer, t.named = false, nil
			all[t.key] = t
		}
	}
	for _, r := range rules {
		r.use()
	}
	sorted := slices.SortedFunc(maps.Values(all), func(a, b *term) int { return cmp.Compare(a.key, b.key) })
	for _, t := range sorted {
		slices.SortFunc(t.named, func(a, b portName) int { return cmp.Compare(a.String(), b.String()) })
	}
	return sorted
}

// class is the addresses that the terms in use cannot tell apart.
type class struct {
	number uint32
	terms  map[string]map[portName][]policy.Ports // by the term's key: the ports of its names
	idle   int                                    // compilations since an address had it
}

// classes numbers classes. A number is a hash of what the class has in common, so it is the same in all runs of the agent.
type classes struct {
	byContent map[string]*class
	numbers   map[uint32]bool
	sorted    []*class
}

// membership returns what an address has in common with others of its class: "" if no term matches it.
func membership(terms []*term, pod *Pod, namespace labels.Set, addr netip.Addr) string {
	var text strings.Builder
	for _, t := range terms {
		if !t.matches(pod, namespace, addr) {
			continue
		}
		ports := ""
		for _, name := range t.named {
			if numbers := name.numbers(pod); len(numbers) > 0 {
				ports += fmt.Sprintf("; %v %v", name, numbers)
			}
		}
		if t.isPeer || ports != "" {
			fmt.Fprintf(&text, "%s%s\n", t.key, ports)
		}
	}
	return text.String()
}

// of returns the class with that content, and whether it is new.
func (c *classes) of(content string, terms []*term, pod *Pod, namespace labels.Set, addr netip.Addr) (found *class, isNew bool) {
	if known := c.byContent[content]; known != nil {
		return known, false
	}
	sum := sha256.Sum256([]byte(content))
	number := binary.BigEndian.Uint32(sum[:])
	for number == 0 || c.numbers[number] {
		number++
	}
	made := &class{number: number, terms: map[string]map[portName][]policy.Ports{}}
	for _, t := range terms {
		if !t.matches(pod, namespace, addr) {
			continue
		}
		ports := map[portName][]policy.Ports{}
		for _, name := range t.named {
			if numbers := name.numbers(pod); len(numbers) > 0 {
				ports[name] = numbers
			}
		}
		if t.isPeer || len(ports) > 0 {
			made.terms[t.key] = ports
		}
	}
	c.byContent[content], c.numbers[number] = made, true
	c.sort()
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
	c.sort()
	return true
}

// selectors returns the selectors of terms in use that match the pods of each class.
func (c *classes) selectors(terms []*term) map[uint32][]nodestate.Selector {
	selectors := map[uint32][]nodestate.Selector{}
	for _, class := range c.sorted {
		for _, t := range terms {
			if class.terms[t.key] != nil && t.selector != nil {
				selectors[class.number] = append(selectors[class.number], *t.selector)
			}
		}
	}
	return selectors
}

func (c *classes) sort() {
	c.sorted = slices.SortedFunc(maps.Values(c.byContent), func(a, b *class) int { return cmp.Compare(a.number, b.number) })
}
