// Package policy parses the key "policy" of a configuration, which says with whom a container may
// talk, and compiles it to rule sets of the datapath. The words and their meaning are those of
// Kubernetes' NetworkPolicy.
package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
)

// Policy is a checked policy of a container.
type Policy struct {
	Ingress, Egress []Rule // nil: the direction is not isolated; empty: it admits nothing
	// Internal isolates both directions, and limits all rules to the container's own network.
	Internal bool
	// Host says that the own node is always admitted. Without it, both directions are isolated: one without
	// a list admits everything but the node.
	Host bool
}

// Rule admits connections between the container and any of the peers, to any of the ports.
type Rule struct {
	Peers []Peer // none: any peer; of an internal policy: any in the own network
	Ports []Ports
}

// Peer is a kind of peers: a CIDR, classes of pods' addresses, the container's own network, or a network by name.
type Peer struct {
	CIDR        netip.Prefix // invalid: another kind
	Except      []netip.Prefix
	Classes     []uint32 // of a cluster's node agent; nil: another kind; empty: no peer at all
	SameNetwork bool
	Network     string
}

// Ports are a range of destination ports.
type Ports struct {
	Protocol    maps.Protocol
	First, Last uint16
}

// Namer names a rule by its number in a rule set, from 1, or returns "" if it has no name.
type Namer func(number uint32) string

// Places names rules by their places in the key "policy".
func Places(isEgress bool) Namer {
	direction := "ingress"
	if isEgress {
		direction = "egress"
	}
	return func(number uint32) string { return fmt.Sprintf("policy.%s[%d]", direction, number-1) }
}

// name returns the name of a rule, or "" for one that the policy implies.
func (n Namer) name(number uint32) string {
	if number == 0 {
		return ""
	}
	return n(number)
}

// IngressPolicy is a value of "ingressPolicy": which containers of this host may open connections to a container.
type IngressPolicy uint8

// The ingress policies.
const (
	Open IngressPolicy = iota
	SameNetwork
	Isolated
)

var ingressPolicies = []string{"open", "same-network", "isolated"}

// String returns the policy's name in a configuration.
func (p IngressPolicy) String() string { return ingressPolicies[p] }

// IngressPolicyOf returns the policy with that name, and whether it exists.
func IngressPolicyOf(name string) (policy IngressPolicy, exists bool) {
	i := slices.Index(ingressPolicies, name)
	return IngressPolicy(max(i, 0)), i >= 0
}

// FromIngressPolicy returns what "ingressPolicy" admits to a container of a network, or nil for Open.
func FromIngressPolicy(policy IngressPolicy, network maps.Network) *maps.RuleSet {
	if policy == Open {
		return nil
	}
	admitted := &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.OutsidePeer, Last: lastPort}}}
	if policy == SameNetwork {
		admitted.Rules = append(admitted.Rules, maps.Rule{Kind: maps.NetworkPeer, Peer: uint32(network), Last: lastPort})
	}
	admitted.Normalize()
	return admitted
}
