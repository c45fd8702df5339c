package policies

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

const (
	// maxTerms limits the sets of pods, each with each name of a port, that the policies of this node's pods name. Each of
	// the cluster's pods is compared with all of them.
	maxTerms = 4096
	// maxAllEntries limits the entries of all rule sets: half of policy_rules, because former rule sets stay until the pods
	// have the new ones. policy_blocks has a quarter of its size.
	maxAllEntries = 1 << 19
)

// named is a set of pods, or the ports of a name that they have.
type named struct {
	term string
	port portName
}

// limitTerms returns the policies that select pods of this node. Those that name too many pods are replaced by ones without
// rules, also in own. Namespaces that name few come first, so none can use up what others need, with whatever number of policies.
// Administrators write those of no namespace.
func limitTerms(own map[*Pod][]*parsed, state *State) (local []*parsed) {
	replaced := map[*parsed]*parsed{}
	for _, policies := range own {
		for _, p := range policies {
			replaced[p] = p
		}
	}
	sums := map[string]int{} // by namespace
	for p := range replaced {
		if p.tier == namespaceTier {
			sums[p.namespace] += p.size()
		}
	}
	sorted := slices.SortedFunc(maps.Keys(replaced), func(a, b *parsed) int {
		return cmp.Or(cmp.Compare(sums[a.namespace], sums[b.namespace]), cmp.Compare(a.size(), b.size()), compareTiers(a, b))
	})
	all := map[named]bool{}
	for _, p := range sorted {
		if !p.nameTerms(all) {
			state.warn("%s: with it, the policies name over %d sets of pods by labels, so it admits nothing", p, maxTerms)
			p = p.refused()
		}
		local = append(local, p)
	}
	for i, p := range sorted {
		replaced[p] = local[i]
	}
	for _, policies := range own {
		for i, p := range policies {
			policies[i] = replaced[p]
		}
	}
	return local
}

// refused returns the policy with rules that admit nothing.
func (p *parsed) refused() *parsed {
	made := &parsed{namespace: p.namespace, name: p.name, tier: p.tier, priority: p.priority, isolates: p.isolates, isRefused: true, isTiered: p.isTiered}
	for direction := range made.rules {
		if p.tier != namespaceTier && p.isolates[direction] {
			made.rules[direction] = []rule{denyAll(p.rules[direction][0].name)}
		}
	}
	return made
}

// size is at least the number of the policy's terms.
func (p *parsed) size() (terms int) {
	for _, rules := range p.rules {
		for _, r := range rules {
			terms += len(p.peersOf(&r)) + len(r.holders)*len(r.named)
		}
	}
	return terms
}

// nameTerms adds the policy's terms to those of all, unless there are too many.
func (p *parsed) nameTerms(all map[named]bool) bool {
	own := map[named]bool{}
	add := func(n named) bool {
		if !all[n] {
			own[n] = true
		}
		return len(all)+len(own) <= maxTerms
	}
	for _, rules := range p.rules {
		for _, r := range rules {
			for _, t := range p.peersOf(&r) {
				if !add(named{t.key, portName{}}) {
					return false
				}
			}
			for _, t := range r.holders {
				for _, name := range r.named {
					if !add(named{t.key, name}) {
						return false
					}
				}
			}
		}
	}
	maps.Copy(all, own)
	return true
}

// limitEntries replaces rules that do not fit by ones that admit only the node. Namespaces with few, and in these pods with few,
// come first.
func limitEntries(own map[*Pod][]*parsed, state *State) {
	type namespaced struct {
		namespace string
		rules     *Rules
	}
	distinct, sums := map[namespaced]bool{}, map[string]int{}
	for pod := range own {
		its := namespaced{pod.Namespace, state.Pods[pod.UID]}
		if !distinct[its] {
			distinct[its] = true
			sums[pod.Namespace] += its.rules.entries
		}
	}
	pods := slices.SortedFunc(maps.Keys(own), func(a, b *Pod) int {
		return cmp.Or(cmp.Compare(sums[a.Namespace], sums[b.Namespace]),
			cmp.Compare(state.Pods[a.UID].entries, state.Pods[b.UID].entries), cmp.Compare(a.UID, b.UID))
	})
	all, fitting := 0, map[*Rules]*Rules{}
	for _, pod := range pods {
		rules := state.Pods[pod.UID]
		if fitting[rules] == nil {
			if fitting[rules] = rules; all+rules.entries > maxAllEntries {
				fitting[rules] = rules.closed()
			}
			all += fitting[rules].entries
		}
		if state.Pods[pod.UID] = fitting[rules]; fitting[rules].isFull {
			state.warn("the policies of pod %s/%s have too many combinations of a peer and a port, so they admit nothing", pod.Namespace, pod.Name)
		}
	}
}

func (s *State) warn(format string, args ...any) {
	s.Warnings = append(s.Warnings, fmt.Sprintf(format, args...))
}
