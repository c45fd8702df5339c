package policies

import (
	"fmt"
	"net/netip"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// parsed is a policy whose selectors and prefixes have been read.
type parsed struct {
	namespace, name string // no namespace: a ClusterNetworkPolicy
	tier            tier
	priority        int32           // in the tier
	namespaces      labels.Selector // of pods; nil: the policy's namespace
	selector        labels.Selector
	isolates        [2]bool // ingress, egress
	rules           [2][]rule
	isRefused       bool // it names too many pods by labels, and has no rules
	isTiered        bool // it selects a pod that a ClusterNetworkPolicy selects, too
}

// String returns the name, such as shop/web.
func (p *parsed) String() string {
	if p.tier == namespaceTier {
		return p.namespace + "/" + p.name
	}
	return p.name
}

// selects reports whether the policy selects a pod. Its namespace's labels are nil if it is not known.
func (p *parsed) selects(pod *Pod, namespace labels.Set) bool {
	if p.tier == namespaceTier {
		return p.namespace == pod.Namespace && p.selector.Matches(pod.Labels)
	}
	return namespace != nil && p.namespaces.Matches(namespace) && p.selector.Matches(pod.Labels)
}

// addNamed adds the names of ports that the policy's rules have.
func (p *parsed) addNamed(named map[portName]bool) {
	for _, rules := range p.rules {
		for i := range rules {
			for _, name := range rules[i].named {
				named[name] = true
			}
		}
	}
}

const (
	ingress = 0
	egress  = 1
)

// rule matches connections with any of the peers, to any of the ports. A NetworkPolicy's admits them.
type rule struct {
	name       string // such as "shop/web ingress[0]"
	action     action
	anyPeer    bool
	terms      []*term       // pods
	blocks     []policy.Peer // CIDRs
	blockTerms []*term       // pods in these
	nodes      []labels.Selector

	anyPort bool
	ports   []policy.Ports
	named   []portName
	holders []*term // with named, for egress: the peers whose ports these may be
}

// portName is a port that a pod's object has a number for.
type portName struct {
	name     string
	protocol maps.Protocol
}

// numbers returns the ports of that name.
func (n portName) numbers(all []NamedPort) (ports []policy.Ports) {
	for _, port := range all {
		if port.Name == n.name && port.Protocol == n.protocol {
			ports = append(ports, policy.Ports{Protocol: port.Protocol, First: port.Port, Last: port.Port})
		}
	}
	return ports
}

func (n portName) String() string { return fmt.Sprintf("%v %q", n.protocol, n.name) }

// parser reads policies. Equal peers of all rules are one term.
type parser struct {
	terms    map[string]*term
	warnings []string
}

// parse returns nil for a policy that selects no pods, because its selector is invalid.
func (p *parser) parse(object *networkingv1.NetworkPolicy) *parsed {
	selector, err := metav1.LabelSelectorAsSelector(&object.Spec.PodSelector)
	name := object.Namespace + "/" + object.Name
	if err != nil {
		p.warn("%s: its podSelector is invalid, so it has no effect: %v", name, err)
		return nil
	}
	before := len(p.warnings)
	policy := &parsed{namespace: object.Namespace, name: object.Name, selector: selector}
	spec := &object.Spec
	policy.isolates = [2]bool{len(spec.PolicyTypes) == 0, len(spec.PolicyTypes) == 0 && len(spec.Egress) > 0}
	for _, kind := range spec.PolicyTypes {
		policy.isolates[ingress] = policy.isolates[ingress] || kind == networkingv1.PolicyTypeIngress
		policy.isolates[egress] = policy.isolates[egress] || kind == networkingv1.PolicyTypeEgress
	}
	if policy.isolates[ingress] {
		policy.rules[ingress] = make([]rule, len(spec.Ingress))
		for i, r := range spec.Ingress {
			policy.rules[ingress][i] = p.rule(object.Namespace, fmt.Sprintf("%s ingress[%d]", name, i), r.From, r.Ports, false)
		}
	}
	if policy.isolates[egress] {
		policy.rules[egress] = make([]rule, len(spec.Egress))
		for i, r := range spec.Egress {
			policy.rules[egress][i] = p.rule(object.Namespace, fmt.Sprintf("%s egress[%d]", name, i), r.To, r.Ports, true)
		}
	}
	p.limitWarnings(before, name)
	return policy
}

// limitWarnings is about those of one policy.
func (p *parser) limitWarnings(before int, name string) {
	if more := len(p.warnings) - before - mostWarnings; more > 0 {
		p.warnings = append(p.warnings[:before+mostWarnings], fmt.Sprintf("%s: %d more peers or ports are invalid", name, more))
	}
}

// A policy has at most so many warnings of at most such a length.
const mostWarnings, mostText = 4, 512

func (p *parser) warn(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if len(text) > mostText {
		text = text[:mostText] + "..."
	}
	p.warnings = append(p.warnings, text)
}

func (p *parser) rule(namespace, name string, peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort, isEgress bool) rule {
	r := rule{name: name, anyPeer: len(peers) == 0, anyPort: len(ports) == 0}
	for _, port := range ports {
		p.addPort(&r, port)
	}
	for _, peer := range peers {
		if peer.IPBlock == nil {
			if t := p.podTerm(namespace, name, peer); t != nil {
				r.terms = append(r.terms, t)
			}
		} else if block, ok := p.block(name, peer.IPBlock); ok {
			p.addBlock(&r, block)
		}
	}
	r.terms, r.named = unique(r.terms), unique(r.named)
	if !isEgress || len(r.named) == 0 {
		return r
	}
	r.holders = slices.Concat(r.terms, r.blockTerms)
	if r.anyPeer {
		r.holders = append(r.holders, p.term(anyTerm()))
	}
	return r
}

func (p *parser) addBlock(r *rule, block policy.Peer) {
	r.blocks, r.blockTerms = append(r.blocks, block), append(r.blockTerms, p.term(blockTerm(block)))
}

// addPort adds a port. One that no packet can have leaves the rule without it.
func (p *parser) addPort(r *rule, port networkingv1.NetworkPolicyPort) {
	protocol, ok := protocolOf(port.Protocol)
	switch {
	case !ok:
		p.warn("%s: no container has ports of protocol %q", r.name, *port.Protocol)
	case port.Port == nil:
		r.ports = append(r.ports, policy.Ports{Protocol: protocol, Last: lastPort})
	case port.Port.Type == intstr.String:
		r.named = append(r.named, portName{port.Port.StrVal, protocol})
	default:
		first, last := port.Port.IntVal, port.Port.IntVal
		if port.EndPort != nil {
			last = *port.EndPort
		}
		if !isPort(first) || !isPort(last) || last < first {
			p.warn("%s: there are no ports %d to %d", r.name, first, last)
			return
		}
		r.ports = append(r.ports, policy.Ports{Protocol: protocol, First: uint16(first), Last: uint16(last)})
	}
}

// podTerm returns nil for a peer that selects no pods.
func (p *parser) podTerm(namespace, rule string, peer networkingv1.NetworkPolicyPeer) *term {
	pods, errPods := selectorOf(peer.PodSelector)
	namespaces, errNamespaces := selectorOf(peer.NamespaceSelector)
	if errPods != nil || errNamespaces != nil || peer.PodSelector == nil && peer.NamespaceSelector == nil {
		p.warn("%s: a peer without a valid selector admits nothing", rule)
		return nil
	}
	if peer.NamespaceSelector == nil {
		return p.term(ownNamespaceTerm(namespace, pods))
	}
	return p.term(namespacesTerm(namespaces, pods))
}

// selectorOf is everything for no selector.
func selectorOf(selector *metav1.LabelSelector) (labels.Selector, error) {
	if selector == nil {
		return labels.Everything(), nil
	}
	return metav1.LabelSelectorAsSelector(selector)
}

// block reports false for one that contains no address.
func (p *parser) block(rule string, block *networkingv1.IPBlock) (peer policy.Peer, ok bool) {
	cidr, err := netip.ParsePrefix(block.CIDR)
	if err != nil || cidr.Addr().Is4In6() {
		p.warn("%s: %q is no network, and admits nothing", rule, block.CIDR)
		return peer, false
	}
	peer.CIDR = cidr.Masked()
	for _, text := range block.Except {
		except, err := netip.ParsePrefix(text)
		if err != nil || except.Addr().Is4In6() {
			p.warn("%s: the exception %q is no network, so %s admits nothing", rule, text, block.CIDR)
			return peer, false
		}
		except = except.Masked()
		switch {
		case !except.Overlaps(peer.CIDR):
		case except.Bits() <= peer.CIDR.Bits():
			return peer, false
		default:
			peer.Except = append(peer.Except, except)
		}
	}
	peer.Except = unique(peer.Except)
	return peer, true
}

// unique removes what is in a list more than once. A policy may have 100,000 of one kind.
func unique[T comparable](list []T) []T {
	if len(list) < 2 {
		return list
	}
	known := make(map[T]bool, len(list))
	return slices.DeleteFunc(list, func(one T) bool {
		isKnown := known[one]
		known[one] = true
		return isKnown
	})
}
