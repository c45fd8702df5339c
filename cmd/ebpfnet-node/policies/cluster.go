package policies

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// tier is when a policy is asked: those of a later tier only about what the earlier ones do not decide.
type tier int

const (
	namespaceTier tier = iota // NetworkPolicy
	adminTier
	baselineTier
)

// compareTiers sorts policies in the order in which they are asked. NetworkPolicies add up, so their order does not matter.
func compareTiers(a, b *parsed) int {
	order := [...]int{adminTier: 0, namespaceTier: 1, baselineTier: 2}
	return cmp.Or(cmp.Compare(order[a.tier], order[b.tier]), cmp.Compare(a.priority, b.priority),
		cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
}

// action is what a rule does with a connection that it matches.
type action int

const (
	accept action = iota
	deny
	pass // to the next tier
)

func (a action) String() string { return [...]string{"", "deny", "pass"}[a] }

// Node is what policies need of a node.
type Node struct {
	Name      string
	Labels    labels.Set
	Addresses []netip.Addr   // in its status, which its kubelet writes
	PodCIDRs  []netip.Prefix // of its pods
}

// NodeOf returns what policies need of a Node object.
func NodeOf(o *corev1.Node) Node {
	node := Node{Name: o.Name, Labels: o.Labels}
	for _, text := range slices.Compact(append([]string{o.Spec.PodCIDR}, o.Spec.PodCIDRs...)) {
		if prefix, err := netip.ParsePrefix(text); err == nil && !prefix.Addr().Is4In6() {
			node.PodCIDRs = append(node.PodCIDRs, prefix.Masked())
		}
	}
	for _, address := range o.Status.Addresses {
		if addr, err := netip.ParseAddr(address.Address); err == nil && addr.Zone() == "" {
			node.Addresses = append(node.Addresses, addr.Unmap())
		}
	}
	return node
}

// withGateways returns the nodes with the gateways of their own pods' prefixes, and no other addresses in those of any node.
func withGateways(nodes []Node) []Node {
	ofPods, lengths := map[netip.Prefix]bool{}, map[int]bool{}
	for _, node := range nodes {
		for _, prefix := range node.PodCIDRs {
			ofPods[prefix], lengths[prefix.Bits()] = true, true
		}
	}
	isOfPods := func(addr netip.Addr) bool {
		for bits := range lengths {
			if prefix, err := addr.Prefix(bits); err == nil && ofPods[prefix] {
				return true
			}
		}
		return false
	}
	nodes = slices.Clone(nodes)
	for i := range nodes {
		node := &nodes[i]
		node.Addresses = slices.DeleteFunc(slices.Clone(node.Addresses), isOfPods)
		for _, prefix := range node.PodCIDRs {
			node.Addresses = append(node.Addresses, prefix.Addr().Next()) // which the tunnel device has
		}
	}
	return nodes
}

// parseCluster returns nil for a policy that selects no pods.
func (p *parser) parseCluster(object *api.ClusterNetworkPolicy) *parsed {
	spec := &object.Spec
	before := len(p.warnings)
	made := &parsed{name: object.Name, priority: spec.Priority, tier: map[api.Tier]tier{api.AdminTier: adminTier, api.BaselineTier: baselineTier}[spec.Tier]}
	peer := api.ClusterNetworkPolicyEgressPeer{Namespaces: spec.Subject.Namespaces, Pods: spec.Subject.Pods}
	var errSubject error
	if made.namespaces, made.selector, errSubject = selectorsOf(&peer); errSubject != nil || made.tier == namespaceTier {
		p.warn("%s: its tier or its subject is not known or invalid, so it has no effect", object.Name)
		return nil
	}
	for i, r := range spec.Ingress {
		var from []api.ClusterNetworkPolicyEgressPeer
		for _, peer := range r.From {
			from = append(from, api.ClusterNetworkPolicyEgressPeer{Namespaces: peer.Namespaces, Pods: peer.Pods})
		}
		made.rules[ingress] = append(made.rules[ingress], p.clusterRule(nameOf(object, "ingress", i, r.Name), r.Action, from, r.Protocols, false))
	}
	for i, r := range spec.Egress {
		made.rules[egress] = append(made.rules[egress], p.clusterRule(nameOf(object, "egress", i, r.Name), r.Action, r.To, r.Protocols, true))
	}
	for direction := range made.rules {
		made.isolates[direction] = len(made.rules[direction]) > 0
	}
	p.limitWarnings(before, object.Name)
	return made
}

// nameOf names a rule, such as: no-smtp egress[0] "mail". A name without a namespace is a ClusterNetworkPolicy's.
func nameOf(object *api.ClusterNetworkPolicy, direction string, i int, own string) string {
	name := fmt.Sprintf("%s %s[%d]", object.Name, direction, i)
	if own != "" {
		name += fmt.Sprintf(" %q", own)
	}
	return name
}

// clusterRule fails closed, as the API says: a rule with a part that is not known or invalid denies everything, but one that
// accepts matches nothing.
func (p *parser) clusterRule(name string, does api.ClusterNetworkPolicyRuleAction, peers []api.ClusterNetworkPolicyEgressPeer,
	protocols []api.ClusterNetworkPolicyProtocol, isEgress bool) rule {
	r := rule{name: name, anyPort: len(protocols) == 0}
	action, isKnown := map[api.ClusterNetworkPolicyRuleAction]action{
		api.ClusterNetworkPolicyRuleActionAccept: accept, api.ClusterNetworkPolicyRuleActionDeny: deny, api.ClusterNetworkPolicyRuleActionPass: pass,
	}[does]
	var problem string
	if !isKnown || len(peers) == 0 {
		problem = "its action is not known, or it has no peers"
	}
	for _, protocol := range protocols {
		problem = cmp.Or(problem, r.addProtocol(&protocol))
	}
	for _, peer := range peers {
		problem = cmp.Or(problem, p.addPeer(&r, &peer))
	}
	if r.action = action; problem == "" {
		if isEgress && len(r.named) > 0 {
			r.holders = slices.Concat(r.terms, r.blockTerms)
		}
		return r
	}
	if isKnown && action == accept {
		p.warn("%s: %s, so the rule matches nothing", name, problem)
		return rule{name: name}
	}
	p.warn("%s: %s, so the rule denies everything", name, problem)
	return denyAll(name)
}

func denyAll(name string) rule { return rule{name: name, action: deny, anyPeer: true, anyPort: true} }

// addProtocol returns what is wrong with it, or "".
func (r *rule) addProtocol(protocol *api.ClusterNetworkPolicyProtocol) string {
	var ports []policy.Ports
	add := func(protocol maps.Protocol, port *api.Port) {
		first, last := int32(0), int32(lastPort)
		if port != nil {
			first, last = port.Number, port.Number
			if port.Range != nil {
				first, last = port.Range.Start, port.Range.End
			}
			if !isPort(first) || !isPort(last) || last < first {
				return
			}
		}
		ports = append(ports, policy.Ports{Protocol: protocol, First: uint16(first), Last: uint16(last)})
	}
	switch {
	case protocol.TCP != nil:
		add(maps.TCP, protocol.TCP.DestinationPort)
	case protocol.UDP != nil:
		add(maps.UDP, protocol.UDP.DestinationPort)
	case protocol.SCTP != nil:
		add(maps.SCTP, protocol.SCTP.DestinationPort)
	case protocol.DestinationNamedPort != "":
		for _, of := range withPorts {
			r.named = append(r.named, portName{protocol.DestinationNamedPort, of})
		}
		return ""
	}
	if r.ports = append(r.ports, ports...); len(ports) == 0 {
		return "a protocol or port is not known or invalid"
	}
	return ""
}

// addPeer returns what is wrong with it, or "".
func (p *parser) addPeer(r *rule, peer *api.ClusterNetworkPolicyEgressPeer) string {
	switch {
	case len(peer.DomainNames) > 0:
		return "domainNames are not supported"
	case peer.Nodes != nil:
		nodes, err := selectorOf(peer.Nodes)
		if r.nodes = append(r.nodes, nodes); err != nil {
			return "a selector of nodes is invalid"
		}
	case len(peer.Networks) > 0:
		for _, network := range peer.Networks {
			cidr, err := netip.ParsePrefix(string(network))
			if err != nil || cidr.Addr().Is4In6() {
				return fmt.Sprintf("%q is no network", network)
			}
			p.addBlock(r, policy.Peer{CIDR: cidr.Masked()})
		}
	default:
		namespaces, pods, err := selectorsOf(peer)
		if err != nil {
			return err.Error()
		}
		r.terms = append(r.terms, p.term(namespacesTerm(namespaces, pods)))
	}
	return ""
}

// selectorsOf returns what selects the pods of a peer.
func selectorsOf(peer *api.ClusterNetworkPolicyEgressPeer) (namespaces, pods labels.Selector, err error) {
	switch {
	case peer.Namespaces != nil:
		namespaces, err = selectorOf(peer.Namespaces)
		return namespaces, labels.Everything(), err
	case peer.Pods != nil:
		if namespaces, err = selectorOf(&peer.Pods.NamespaceSelector); err != nil {
			return nil, nil, err
		}
		pods, err = selectorOf(&peer.Pods.PodSelector)
		return namespaces, pods, err
	}
	return nil, nil, fmt.Errorf("a kind of peers is not known")
}
