package admin

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// objects has the NetworkPolicies that the rules of pods come from.
type objects struct {
	state string // path of the node agent's
	file  nodestate.RulesFile
}

// source is what one direction of a policy comes from: objects, or the key policy.
type source struct {
	policies []string
	rules    []nodestate.ObjectRule // by their numbers, from 1
	denied   []maps.Rule            // what they deny
	classes  map[uint32][]nodestate.Selector
	isPod    bool
	pod      string // its name, such as shop/web-0; "": not known
	isEgress bool
}

func (o *objects) of(entry maps.Policy, isEgress bool) (source, error) {
	if !entry.IsPod {
		return source{isEgress: isEgress}, nil
	}
	all, err := o.file.Read(o.state)
	from := source{classes: all.Classes, isPod: true, pod: all.Pods[entry.Owner.String()].Name, isEgress: isEgress}
	from.policies, from.rules = all.Of(entry.Owner.String(), isEgress)
	from.denied = all.Denied(entry.Owner.String(), isEgress)
	return from, err
}

// name is a policy.Namer.
func (s *source) name(number uint32) string {
	switch {
	case !s.isPod:
		return policy.Places(s.isEgress)(number)
	case int(number) > len(s.rules):
		return fmt.Sprintf("NetworkPolicy rule %d", number)
	}
	return s.rules[number-1].Name
}

func (s *source) direction(set *maps.RuleSet, nameOf func(maps.Network) string) *Direction {
	if set == nil {
		return nil
	}
	d := &Direction{set.Host, s.policies, policy.Decompile(set, s.name, nameOf)}
	for _, decompiled := range d.Rules {
		rule := s.rule(decompiled.Rule)
		for i, peer := range decompiled.Peers {
			isIts := func(selector nodestate.Selector) bool {
				return len(rule.Pods) == 0 || slices.Contains(rule.Pods, selector)
			}
			for _, selector := range s.classes[peer.Class] {
				if isIts(selector) {
					decompiled.Peers[i].Pods = append(decompiled.Peers[i].Pods, selector.String())
				}
			}
		}
	}
	return d
}

func (s *source) rule(name string) nodestate.ObjectRule {
	if i := slices.IndexFunc(s.rules, func(r nodestate.ObjectRule) bool { return r.Name == name }); i >= 0 {
		return s.rules[i]
	}
	return nodestate.ObjectRule{Name: name}
}

// candidates says of each rule why it admits a connection or not.
func (s *source) candidates(set *maps.RuleSet, c policy.Connection, peer string) []policy.Candidate {
	var names []string
	last := uint32(len(s.rules))
	for _, rule := range set.Rules {
		last = max(last, rule.Number)
	}
	for number := range last {
		names = append(names, s.name(number+1))
	}
	return policy.Candidates(set, names, c, func(name string) (miss, action string) {
		return s.missOf(name, c.Peer, peer), s.rule(name).Action
	})
}

// missOf says what of a peer a rule does not match, or "" if it matches. The peer's pod is namespace/name, or "".
func (s *source) missOf(name string, peer maps.Peer, pod string) string {
	const most = 5 // of long lists

	rule, classes := s.rule(name), s.classes[peer.Class]
	if !s.isPod || len(rule.Pods)+len(rule.Blocks) == 0 && !rule.Any {
		return "peer: not admitted"
	}
	matches := func(selector nodestate.Selector) bool { return slices.Contains(classes, selector) }
	contains := func(block nodestate.Block) bool { return block.Contains(peer.Addr) }
	if rule.Any || slices.ContainsFunc(rule.Pods, matches) || slices.ContainsFunc(rule.Blocks, contains) {
		return ""
	}
	namespace, _, _ := strings.Cut(pod, "/")
	for _, known := range classes { // a selector that matches it may name it
		namespace = cmp.Or(namespace, known.Namespace)
	}
	var misses []string
	for _, selector := range rule.Pods {
		misses = append(misses, missOfSelector(selector, namespace))
	}
	for _, block := range rule.Blocks {
		misses = append(misses, "address: not in "+policy.DecompiledPeer{CIDR: block.CIDR.String(), Except: block.Except}.String())
	}
	if more := len(misses) - most; more > 0 {
		misses = append(misses[:most], fmt.Sprintf("%d more", more))
	}
	return strings.Join(misses, "; ")
}

// missOfSelector says whether a selector does not match a pod's namespace or its labels, as far as the namespace is known.
func missOfSelector(selector nodestate.Selector, namespace string) string {
	switch {
	case namespace != "" && selector.Namespace != "" && selector.Namespace != namespace:
		return fmt.Sprintf("namespace: %s, not %s", namespace, selector.Namespace)
	case namespace != "" && selector.Namespace == namespace, selector.Namespace == "" && selector.Namespaces == "":
		return "label: not of " + selector.String()
	}
	return "namespace or label: not of " + selector.String()
}

// Explainer says why rules admit connections or not. It keeps what it reads.
type Explainer struct {
	datapath *loader.Datapath
	host     *netlink.Handle
	sets     *maps.RuleSets
	objects  objects
}

// NewExplainer returns an explainer, which uses a datapath, netlink, and the files of the node agent whose state is at a path.
func NewExplainer(datapath *loader.Datapath, host *netlink.Handle, state string) *Explainer {
	return &Explainer{datapath: datapath, host: host, sets: maps.NewRuleSets(datapath), objects: objects{state: state}}
}

// Judgment is what one direction of a container says about a connection.
type Judgment struct {
	IsIsolated bool               `json:"isolated"` // else it admits everything
	Admits     bool               `json:"admits"`
	IsAudit    bool               `json:"audit,omitempty"`    // what it does not admit passes
	Policies   []string           `json:"policies,omitempty"` // NetworkPolicies that isolate the direction
	Why        string             `json:"why"`
	Candidates []policy.Candidate `json:"rules"` // of Explain
	Pod        string             `json:"-"`     // that they isolate, such as shop/web-0
}

// String returns the reason, with the policies of a refusal.
func (j Judgment) String() string {
	if j.Admits || len(j.Policies) == 0 {
		return j.Why
	}
	return fmt.Sprintf("isolated by %s: %s", strings.Join(j.Policies, ", "), j.Why)
}

// Judge judges a connection by the rules in one direction, as they are now. The programs may know more, such as
// that the packet is a reply.
func (e *Explainer) Judge(entry maps.Policy, isEgress bool, c policy.Connection) (Judgment, error) {
	j, _, _, err := e.judge(entry, isEgress, c)
	return j, err
}

// Explain judges as Judge, and says of each rule why it admits the connection or not. The peer's pod is namespace/name,
// or "" if it is not known.
func (e *Explainer) Explain(entry maps.Policy, isEgress bool, c policy.Connection, pod string) (Judgment, error) {
	j, set, from, err := e.judge(entry, isEgress, c)
	if err == nil && set != nil {
		j.Candidates = from.candidates(set, c, pod)
	}
	return j, err
}

func (e *Explainer) judge(entry maps.Policy, isEgress bool, c policy.Connection) (j Judgment, set *maps.RuleSet, from source, err error) {
	set, egress, err := e.sets.Of(entry)
	if err != nil {
		return j, nil, from, err
	}
	if isEgress {
		set = egress
	}
	if from, err = e.objects.of(entry, isEgress); err != nil {
		return j, nil, from, err
	}
	if set != nil {
		set.Denied = from.denied
	}
	j = Judgment{IsIsolated: set != nil, IsAudit: set != nil && set.Audit, Policies: from.policies, Pod: from.pod}
	j.Admits, j.Why = policy.Explain(set, from.name, c)
	if !j.Admits && from.isPod && from.policies == nil {
		j.Why = "the node agent has not written the pod's NetworkPolicies"
	}
	return j, set, from, nil
}

// PolicyOf returns the policy of an attachment.
func (e *Explainer) PolicyOf(a *Attachment) (maps.Policy, error) {
	device, _, err := maps.GetDevice(e.datapath, a.index)
	if err != nil {
		return maps.Policy{}, err
	}
	return maps.GetPolicy(e.datapath, device.Policy)
}

// Isolating returns the NetworkPolicies that isolate a direction of an attachment.
func (e *Explainer) Isolating(a *Attachment, isEgress bool) ([]string, error) {
	entry, err := e.PolicyOf(a)
	if err != nil {
		return nil, err
	}
	from, err := e.objects.of(entry, isEgress)
	return from.policies, err
}

// PeerOf returns the peer with an address.
func (e *Explainer) PeerOf(addr netip.Addr) (peer maps.Peer, err error) {
	if peer.Addr = addr; !addr.IsValid() {
		return peer, nil
	}
	if peer.Class, err = maps.PeerClass(e.datapath, addr); err != nil {
		return peer, err
	}
	endpoint, isContainer, err := maps.GetEndpoint(e.datapath, addr)
	if isContainer {
		peer.Network = endpoint.Network
		return peer, err
	}
	routes, errRoute := e.host.RouteGet(addr.AsSlice()) // an address without a route is not the host's
	peer.Host = errRoute == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
	return peer, err
}
