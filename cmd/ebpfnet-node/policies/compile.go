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
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

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
	IsForAll   bool                            // namespaces that are not known yet may have policies, too
	NeedsPeers bool                            // rules name pods by labels, so pods of other nodes matter
	Warnings   []string
}

// Rules are what a pod admits. Pods of the same policies share them.
type Rules struct {
	Sets    [2]*ebpfmaps.RuleSet // ingress, egress; nil: not isolated
	Sources [2]source            // what they come from

	entries int  // of the maps
	isFull  bool // a direction does not fit, and admits only the node
}

// closed returns the same without rules.
func (r *Rules) closed() *Rules {
	made := &Rules{isFull: true}
	for direction, set := range r.Sets {
		if set != nil {
			made.Sets[direction] = &ebpfmaps.RuleSet{Host: true, Audit: set.Audit}
			made.Sources[direction].policies = r.Sources[direction].policies
		}
	}
	return made
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
	cluster    []*api.ClusterNetworkPolicy
	listed     []Node
	nodes      []Node         // the same, withGateways
	ranges     []netip.Prefix // of pods' addresses, where rules deny
	namespaces map[string]labels.Set
	modes      map[string]string
	parsed     []*parsed // in the order in which they decide
	anyPod     *term
	warnings   []string
	terms      string // in use
	set        *termSet
	holders    holders
	known      map[*Pod][]*class // of each address; nil: no term has it
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
	own := c.choose(cluster.Pods, state)
	c.modes = cluster.Modes
	for _, namespace := range state.Namespaces {
		if mode := c.modes[namespace]; mode != "" && mode != auditMode && mode != enforceMode {
			state.warn("of namespace %s: its annotation %s is %q: expected %s or %s", namespace, ModeAnnotation, mode, enforceMode, auditMode)
		}
	}
	terms := termsOf(limitTerms(own, state), c.anyPod)
	state.NeedsPeers = len(terms) > 0
	c.holders = holders{}
	for _, pod := range cluster.Pods {
		c.holders.add(pod)
	}
	if c.anyPod.isPeer {
		c.findRanges()
	}
	c.classify(terms, state)
	used := map[*Rules]bool{}
	for pod, policies := range own {
		rules := c.rulesOf(pod, policies)
		state.Pods[pod.UID], state.Names[pod.UID], used[rules] = rules, pod.Namespace+"/"+pod.Name, true
		for _, addr := range pod.Addresses {
			if c.holders[addr][0] == pod {
				state.Own[addr] = pod.UID
			}
		}
	}
	maps.DeleteFunc(c.rules, func(_ string, rules *Rules) bool { return !used[rules] })
	limitEntries(own, state)
	state.Selectors = c.classes.selectors(terms)
	slices.Sort(state.Warnings)
	state.Warnings = slices.Compact(state.Warnings)
	return state
}

// read parses the policies if they have changed.
func (c *Compiler) read(cluster Cluster) {
	objects, clusterWide := slices.Clone(cluster.Policies), slices.Clone(cluster.ClusterPolicies)
	slices.SortFunc(objects, func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(clusterWide, func(a, b *api.ClusterNetworkPolicy) int { return cmp.Compare(a.Name, b.Name) })
	if c.rules == nil || !reflect.DeepEqual(c.namespaces, cluster.Namespaces) {
		c.known, c.rules, c.namespaces = map[*Pod][]*class{}, map[string]*Rules{}, maps.Clone(cluster.Namespaces)
	}
	if !reflect.DeepEqual(c.listed, cluster.Nodes) {
		c.listed, c.nodes, c.rules = cluster.Nodes, withGateways(cluster.Nodes), map[string]*Rules{}
	}
	if c.classes.byContent == nil {
		c.classes = classes{byContent: map[content]*class{}, numbers: map[uint32]bool{}}
	}
	if slices.Equal(objects, c.objects) && slices.Equal(clusterWide, c.cluster) && c.anyPod != nil {
		return
	}
	p := &parser{terms: map[string]*term{}}
	c.objects, c.cluster, c.parsed, c.rules, c.anyPod = objects, clusterWide, nil, map[string]*Rules{}, p.term(anyTerm())
	for _, object := range objects {
		if parsed := p.parse(object); parsed != nil {
			c.parsed = append(c.parsed, parsed)
		}
	}
	for _, object := range clusterWide {
		if parsed := p.parseCluster(object); parsed != nil {
			c.parsed = append(c.parsed, parsed)
		}
	}
	slices.SortStableFunc(c.parsed, compareTiers)
	c.warnings = p.warnings
}

// choose returns the policies of each pod of this node that policies may select.
func (c *Compiler) choose(pods []*Pod, state *State) map[*Pod][]*parsed {
	namespaces := map[string]bool{}
	for _, p := range c.parsed {
		if p.isTiered = false; p.tier == namespaceTier {
			namespaces[p.namespace] = true
		} else {
			state.IsForAll = true
		}
	}
	if state.IsForAll {
		for namespace := range c.namespaces {
			namespaces[namespace] = true
		}
	}
	state.Namespaces = slices.Sorted(maps.Keys(namespaces))
	own, holders := map[*Pod][]*parsed{}, c.uidHolders(pods)
	for _, pod := range pods {
		if pod.Node != c.Node || pod.IsDone {
			continue
		}
		if holder := holders[pod.UID]; holder != pod {
			state.warn("pod %s/%s says that it mirrors a static pod, and has the UID of pod %s/%s: its policies have no effect", pod.Namespace, pod.Name, holder.Namespace, holder.Name)
			continue
		}
		namespace := c.labelsOf(pod.Namespace)
		if state.IsForAll && namespace == nil {
			continue // ADD waits until it is known
		}
		if !namespaces[pod.Namespace] {
			state.Released[pod.UID] = true
			continue
		}
		selected := c.selecting(pod, namespace)
		if !pod.HostNetwork {
			own[pod] = selected
			continue
		}
		for _, p := range selected {
			if p.tier == namespaceTier {
				state.warn("%s: it selects pods with the node's network, on which it has no effect", p)
			}
		}
	}
	return own
}

// uidHolders returns the pod that has a UID: the real one, or else the oldest of those that say so by an annotation, which anybody
// who may create pods may set.
func (c *Compiler) uidHolders(pods []*Pod) map[string]*Pod {
	holders := map[string]*Pod{}
	for _, pod := range pods {
		if pod.Node != c.Node || pod.IsDone {
			continue
		}
		holder := holders[pod.UID]
		if holder == nil || holder.IsMirror && (!pod.IsMirror || pod.Created.Before(holder.Created)) {
			holders[pod.UID] = pod
		}
	}
	return holders
}

// selecting returns the policies that select a pod, and notes whether one for the cluster is among them.
func (c *Compiler) selecting(pod *Pod, namespace labels.Set) []*parsed {
	selected := []*parsed{}
	for _, p := range c.parsed {
		if p.selects(pod, namespace) {
			selected = append(selected, p)
		}
	}
	if !pod.HostNetwork && (isTiered(selected, ingress) || isTiered(selected, egress)) {
		for _, p := range selected {
			p.isTiered = true
		}
	}
	return selected
}

// labelsOf returns a namespace's labels; nil: it is not known.
func (c *Compiler) labelsOf(namespace string) labels.Set {
	set, exists := c.namespaces[namespace]
	if exists && set == nil {
		set = labels.Set{}
	}
	return set
}

// classify finds the class of each address.
func (c *Compiler) classify(terms []*term, state *State) {
	var text strings.Builder
	for _, t := range terms {
		fmt.Fprintf(&text, "%s %v %v\n", t.key, t.isPeer, t.named)
	}
	if text.String() != c.terms || c.set == nil {
		c.known, c.terms, c.set = map[*Pod][]*class{}, text.String(), newTermSet(terms)
	}
	before := c.known
	used, hasNew := map[*class]bool{}, false
	c.known = make(map[*Pod][]*class, len(before)) // without pods that are gone
	for addr, pods := range c.holders {
		if known := before[pods[0]]; known != nil {
			c.known[pods[0]] = known
		}
		class, isNew := c.classOf(addr, pods[0])
		if hasNew = hasNew || isNew; class != nil {
			state.Classes[addr], used[class] = class.number, true
		}
	}
	if c.classes.retire(used) || hasNew {
		c.rules = map[string]*Rules{}
		c.classes.sort()
	}
}

// classOf returns the class of a pod's address, or nil, and whether one of the pod's is new.
func (c *Compiler) classOf(addr netip.Addr, pod *Pod) (found *class, hasNew bool) {
	known := c.known[pod]
	if known == nil {
		namespace := c.labelsOf(pod.Namespace)
		for _, own := range pod.Addresses {
			class, isNew := c.classes.of(c.set.classOf(pod, namespace, own))
			known, hasNew = append(known, class), hasNew || isNew
		}
		c.known[pod] = known
	}
	return known[slices.Index(pod.Addresses, addr)], hasNew
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
			delete(c.known, event.Before)
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
		if c.anyPod.isPeer && !c.isOfPods(netip.PrefixFrom(addr, addr.BitLen())) {
			return nil, false // another block
		}
		class, hasNew := c.classOf(addr, pods[0])
		if hasNew {
			c.classes.sort()
			c.rules = map[string]*Rules{}
			return nil, false
		}
		if class != nil {
			changed[addr] = class.number
		}
	}
	return changed, true
}

// rulesOf compiles the policies of a pod.
func (c *Compiler) rulesOf(pod *Pod, policies []*parsed) *Rules {
	var text strings.Builder
	named := map[portName]bool{}
	for _, p := range policies {
		fmt.Fprintf(&text, "%q/%q %t\n", p.namespace, p.name, p.isRefused)
		p.addNamed(named)
	}
	for _, port := range pod.portsNamed(named) {
		fmt.Fprintf(&text, "%q %v %d\n", port.Name, port.Protocol, port.Port)
	}
	isAudit := c.modes[pod.Namespace] == auditMode
	fmt.Fprint(&text, isAudit)
	if known := c.rules[text.String()]; known != nil {
		return known
	}
	made := &Rules{}
	for direction := range made.Sets {
		set, source, fits := c.compile(pod, policies, direction)
		if len(source.policies) == 0 {
			continue
		}
		set.Audit = isAudit && !isTiered(policies, direction)
		if made.Sets[direction], made.Sources[direction] = set, source; !fits {
			made.isFull = true
		}
		made.entries += set.Entries()
	}
	if made.isFull {
		made = made.closed()
	}
	c.rules[text.String()] = made
	return made
}

// compile returns the rule set of one direction, and what it comes from; without a policy, the direction is not isolated.
func (c *Compiler) compile(pod *Pod, policies []*parsed, direction int) (set *ebpfmaps.RuleSet, from source, fits bool) {
	if isTiered(policies, direction) {
		return c.tiered(pod, policies, direction)
	}
	rules, from := c.collect(pod, policies, direction)
	if rules == nil {
		return &ebpfmaps.RuleSet{Host: true}, from, false
	}
	set, fits = (&policy.Policy{Host: true}).CompileRules(rules, "")
	return set, from, fits
}

// collect returns the rules of one direction, and what they come from; without a policy, the direction is not isolated. The
// rules are nil if there are too many.
func (c *Compiler) collect(pod *Pod, policies []*parsed, direction int) (rules []policy.Rule, from source) {
	rules = []policy.Rule{} // isolated, without a rule
	entries := 0            // at least
	for _, p := range policies {
		if !p.isolates[direction] {
			continue
		}
		from.policies = append(from.policies, p.String())
		rules, from.rules = slices.Grow(rules, len(p.rules[direction])), slices.Grow(from.rules, len(p.rules[direction]))
		for i := range p.rules[direction] {
			r := &p.rules[direction][i]
			for _, rule := range c.expand(r, pod) {
				rules, from.rules = append(rules, rule), append(from.rules, r)
				for _, peer := range rule.Peers {
					entries += len(peer.Classes) * max(1, len(rule.Ports))
				}
			}
			if entries > policy.MaxEntries {
				return nil, from
			}
		}
	}
	return rules, from
}

// expand returns the rules for the compiler: one for the numbers of ports, and with names of ports for egress, one for each
// list of numbers that classes have for them.
func (c *Compiler) expand(r *rule, pod *Pod) (rules []policy.Rule) {
	ports := slices.Clip(r.ports)
	if len(r.holders) == 0 { // ingress
		for _, name := range r.named {
			ports = append(ports, name.numbers(pod.Ports)...)
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
	if len(c.ports) == 0 || !slices.ContainsFunc(r.holders, c.has) {
		return nil
	}
	for _, name := range r.named {
		ports = append(ports, name.numbers(c.ports)...)
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
		if slices.ContainsFunc(r.terms, class.has) {
			peer.Classes = append(peer.Classes, class.number)
		}
	}
	return append([]policy.Peer{peer}, r.blocks...)
}
