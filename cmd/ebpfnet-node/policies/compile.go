// Package policies compiles Kubernetes' NetworkPolicy objects to rule sets for this node's pods, and to classes of
// addresses by which rules name pods.
package policies

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"

	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// State is what this node's datapath must have.
type State struct {
	Pods       map[string]*Rules               // by UID: this node's pods in namespaces with policies
	Names      map[string]string               // of these pods, by UID, such as shop/web-0
	Own        map[netip.Addr]string           // the UIDs of these pods, by address
	Released   map[string]bool                 // the UIDs of this node's pods in other namespaces
	Classes    map[netip.Addr]uint32           // of the addresses of pods that rules may name
	Selectors  map[uint32][]nodestate.Selector // of rules, by the classes that they match
	Namespaces []string                        // those with policies
	NeedsPeers bool                            // rules name pods by labels, so pods of other nodes matter
	Warnings   []string
}

// Rules are what a pod admits. Pods of the same policies share them.
type Rules struct {
	Sets    [2]*ebpfmaps.RuleSet // ingress, egress; nil: not isolated
	Sources [2]source            // what they come from

	warning string
}

// source is what one direction comes from.
type source struct {
	policies []string // such as shop/web
	rules    []*rule  // by the rules' numbers, from 1
}

// Isolating returns the policies that isolate a direction: 0 is ingress, 1 egress.
func (r *Rules) Isolating(direction int) []string { return r.Sources[direction].policies }

// uses reports whether a rule names the class.
func (r *Rules) uses(class uint32) bool {
	return slices.ContainsFunc(r.Sets[:], func(set *ebpfmaps.RuleSet) bool {
		return set != nil && slices.ContainsFunc(set.Rules, func(rule ebpfmaps.Rule) bool {
			return rule.Kind == ebpfmaps.ClassPeer && rule.Peer == class
		})
	})
}

// Compiler compiles. What it keeps between compilations only saves time, except for classes that a compilation before has
// used: rules name these, too, so that no address is without its class while the datapath changes.
type Compiler struct {
	Node string

	objects    []*networkingv1.NetworkPolicy
	namespaces map[string]labels.Set
	modes      map[string]string
	parsed     []*parsed
	warnings   []string
	termText   string // terms in use
	terms      []*term
	holders    holders
	contents   map[*Pod][]string // of the classes of each address
	classes    classes
	rules      map[string]*Rules // by what they are compiled from
}

// Compile returns the state for a cluster.
func (c *Compiler) Compile(cluster Cluster) *State {
	c.read(cluster)
	state := &State{
		Pods: map[string]*Rules{}, Names: map[string]string{}, Own: map[netip.Addr]string{}, Released: map[string]bool{}, Classes: map[netip.Addr]uint32{},
		Warnings: slices.Clone(c.warnings),
	}
	own, local := c.choose(cluster.Pods, state)
	c.modes = cluster.Modes
	for _, namespace := range state.Namespaces {
		if mode := c.modes[namespace]; mode != "" && mode != auditMode && mode != enforceMode {
			state.Warnings = append(state.Warnings, fmt.Sprintf("of namespace %s: its annotation %s is %q: expected %s or %s",
				namespace, ModeAnnotation, mode, enforceMode, auditMode))
		}
	}
	terms := termsOf(local)
	state.NeedsPeers = len(terms) > 0
	c.terms, c.holders = terms, holders{}
	for _, pod := range cluster.Pods {
		c.holders.add(pod)
	}
	c.classify(state)
	for pod, policies := range own {
		rules := c.rulesOf(pod, policies)
		state.Names[pod.UID] = pod.Namespace + "/" + pod.Name
		if state.Pods[pod.UID] = rules; rules.warning != "" {
			state.Warnings = append(state.Warnings, rules.warning)
		}
		for _, addr := range pod.Addresses {
			if c.holders[addr][0] == pod {
				state.Own[addr] = pod.UID
			}
		}
	}
	state.Selectors = c.classes.selectors(terms)
	slices.Sort(state.Warnings)
	state.Warnings = slices.Compact(state.Warnings)
	return state
}

// read parses the policies if they have changed.
func (c *Compiler) read(cluster Cluster) {
	objects := slices.Clone(cluster.Policies)
	slices.SortFunc(objects, func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	if c.rules == nil || !reflect.DeepEqual(c.namespaces, cluster.Namespaces) {
		c.contents, c.rules, c.namespaces = map[*Pod][]string{}, map[string]*Rules{}, maps.Clone(cluster.Namespaces)
	}
	if c.classes.byContent == nil {
		c.classes = classes{byContent: map[string]*class{}, numbers: map[uint32]bool{}}
	}
	if slices.Equal(objects, c.objects) {
		return
	}
	p := &parser{terms: map[string]*term{}}
	c.objects, c.parsed, c.rules = objects, nil, map[string]*Rules{}
	for _, object := range objects {
		if parsed := p.parse(object); parsed != nil {
			c.parsed = append(c.parsed, parsed)
		}
	}
	c.warnings = p.warnings
}

// choose returns the policies of each pod of this node that policies may select, and all policies that select one.
func (c *Compiler) choose(pods []*Pod, state *State) (own map[*Pod][]*parsed, local []*parsed) {
	byNamespace := map[string][]*parsed{}
	for _, p := range c.parsed {
		byNamespace[p.namespace] = append(byNamespace[p.namespace], p)
	}
	state.Namespaces = slices.Sorted(maps.Keys(byNamespace))
	own, isLocal := map[*Pod][]*parsed{}, map[*parsed]bool{}
	for _, pod := range pods {
		if pod.Node != c.Node || pod.IsDone {
			continue
		}
		policies, ok := byNamespace[pod.Namespace]
		if !ok {
			state.Released[pod.UID] = true
			continue
		}
		selected := []*parsed{}
		for _, p := range policies {
			if !p.selector.Matches(pod.Labels) {
				continue
			}
			if pod.HostNetwork {
				state.Warnings = append(state.Warnings, fmt.Sprintf("%s/%s: it selects pods with the node's network, on which it has no effect", p.namespace, p.name))
				continue
			}
			selected, isLocal[p] = append(selected, p), true
		}
		if !pod.HostNetwork {
			own[pod] = selected
		}
	}
	return own, slices.DeleteFunc(slices.Clone(c.parsed), func(p *parsed) bool { return !isLocal[p] })
}

// classify finds the class of each address.
func (c *Compiler) classify(state *State) {
	var text strings.Builder
	for _, t := range c.terms {
		fmt.Fprintf(&text, "%s %v %v\n", t.key, t.isPeer, t.named)
	}
	if text.String() != c.termText {
		c.contents, c.termText = map[*Pod][]string{}, text.String()
	}
	before := c.contents
	used, hasNew := map[*class]bool{}, false
	c.contents = make(map[*Pod][]string, len(before)) // without pods that are gone
	for addr, pods := range c.holders {
		if known := before[pods[0]]; known != nil {
			c.contents[pods[0]] = known
		}
		if class, isNew := c.classOf(addr, pods[0]); class != nil {
			state.Classes[addr], used[class], hasNew = class.number, true, hasNew || isNew
		}
	}
	if c.classes.retire(used) || hasNew {
		c.rules = map[string]*Rules{}
	}
}

// classOf returns the class of a pod's address, or nil, and whether it is new.
func (c *Compiler) classOf(addr netip.Addr, pod *Pod) (found *class, isNew bool) {
	namespace, known := c.namespaces[pod.Namespace]
	if known && namespace == nil {
		namespace = labels.Set{}
	}
	contents := c.contents[pod]
	if contents == nil {
		for _, own := range pod.Addresses {
			contents = append(contents, membership(c.terms, pod, namespace, own))
		}
		c.contents[pod] = contents
	}
	content := contents[slices.Index(pod.Addresses, addr)]
	if content == "" {
		return nil, false
	}
	return c.classes.of(content, c.terms, pod, namespace, addr)
}

// Event is what has become of a pod; nil: there was or is none.
type Event struct{ Before, Now *Pod }

// Update returns the classes of the addresses of pods of other nodes that have changed since Compile; 0: none. isAll is false
// if more than classes changes, so that all must be compiled.
func (c *Compiler) Update(events []Event) (changed map[netip.Addr]uint32, isAll bool) {
	changed = map[netip.Addr]uint32{}
	for _, event := range events {
		for _, pod := range []*Pod{event.Before, event.Now} {
			if pod == nil {
				continue
			}
			for _, addr := range pod.Addresses {
				changed[addr] = 0
			}
		}
		if event.Before != nil {
			c.holders.remove(event.Before)
			delete(c.contents, event.Before)
		}
		if event.Now != nil {
			c.holders.add(event.Now)
		}
	}
	for addr := range changed {
		pods := c.holders[addr]
		if slices.ContainsFunc(pods, func(pod *Pod) bool { return pod.Node == c.Node }) {
			return nil, false
		}
		if len(pods) == 0 {
			continue
		}
		class, isNew := c.classOf(addr, pods[0])
		if isNew {
			c.rules = map[string]*Rules{}
			return nil, false
		}
		if class != nil {
			changed[addr] = class.number
		}
	}
	return changed, true
}

// rulesOf compiles the policies of a pod. A direction that does not fit admits only the node.
func (c *Compiler) rulesOf(pod *Pod, policies []*parsed) *Rules {
	var text strings.Builder
	for _, p := range policies {
		fmt.Fprintf(&text, "%s/%s\n", p.namespace, p.name)
	}
	isAudit := c.modes[pod.Namespace] == auditMode
	fmt.Fprint(&text, pod.Ports, isAudit)
	if known := c.rules[text.String()]; known != nil {
		return known
	}
	made := &Rules{}
	for direction := range made.Sets {
		rules, source := c.collect(pod, policies, direction)
		if len(source.policies) == 0 {
			continue
		}
		compiled := &policy.Policy{Host: true}
		set, fits := compiled.CompileRules(rules, "")
		if !fits {
			made.warning = fmt.Sprintf("the policies of pod %s/%s have too many combinations of a peer and a port, so they admit nothing", pod.Namespace, pod.Name)
			set, source.rules = &ebpfmaps.RuleSet{Host: true}, nil
		}
		set.Audit = isAudit
		made.Sets[direction], made.Sources[direction] = set, source
	}
	c.rules[text.String()] = made
	return made
}

// collect returns the rules of one direction, and what they come from; without a policy, the direction is not isolated.
func (c *Compiler) collect(pod *Pod, policies []*parsed, direction int) (rules []policy.Rule, from source) {
	rules = []policy.Rule{} // isolated, without a rule
	for _, p := range policies {
		if !p.isolates[direction] {
			continue
		}
		from.policies = append(from.policies, p.namespace+"/"+p.name)
		for i := range p.rules[direction] {
			r := &p.rules[direction][i]
			for _, rule := range c.expand(r, pod) {
				rules, from.rules = append(rules, rule), append(from.rules, r)
			}
		}
	}
	return rules, from
}

// expand returns the rules for the compiler: one for the numbers of ports, and with names of ports for egress, one for each
// list of numbers that classes have for them.
func (c *Compiler) expand(r *rule, pod *Pod) (rules []policy.Rule) {
	ports := r.ports
	if len(r.holders) == 0 { // ingress
		for _, name := range r.named {
			ports = slices.Concat(ports, name.numbers(pod))
		}
	}
	if r.anyPort || len(ports) > 0 {
		rules = append(rules, policy.Rule{Peers: c.peers(r), Ports: ports})
	}
	if len(r.holders) == 0 {
		return rules
	}
	byPorts := map[string]*policy.Rule{}
	for _, class := range c.classes.sorted {
		ports := class.portsFor(r)
		if len(ports) == 0 {
			continue
		}
		key := fmt.Sprint(ports)
		if byPorts[key] == nil {
			byPorts[key] = &policy.Rule{Peers: []policy.Peer{{}}, Ports: ports}
		}
		byPorts[key].Peers[0].Classes = append(byPorts[key].Peers[0].Classes, class.number)
	}
	for _, key := range slices.Sorted(maps.Keys(byPorts)) {
		rules = append(rules, *byPorts[key])
	}
	return rules
}

// portsFor returns the class's numbers for the names of ports of a rule.
func (c *class) portsFor(r *rule) (ports []policy.Ports) {
	for _, holder := range r.holders {
		for _, name := range r.named {
			for _, port := range c.terms[holder.key][name] {
				if !slices.Contains(ports, port) {
					ports = append(ports, port)
				}
			}
		}
	}
	return ports
}

// peers returns nil for any peer.
func (c *Compiler) peers(r *rule) []policy.Peer {
	if r.anyPeer {
		return nil
	}
	peer := policy.Peer{Classes: []uint32{}} // not nil: a rule whose peers are none admits nobody
	for _, class := range c.classes.sorted {
		if slices.ContainsFunc(r.terms, func(t *term) bool { return class.terms[t.key] != nil }) {
			peer.Classes = append(peer.Classes, class.number)
		}
	}
	return append([]policy.Peer{peer}, r.blocks...)
}
