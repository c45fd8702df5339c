// Package policy parses the key "policy" of a configuration, which says with whom a container may
// talk, and compiles it to rule sets of the datapath. The words and their meaning are those of
// Kubernetes' NetworkPolicy.
package policy

import (
	"fmt"
	"net/netip"

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

// Place names a rule by its number in a rule set, or returns "" for a rule that the policy implies.
func Place(isEgress bool, number uint32) string {
	switch {
	case number == 0:
		return ""
	case isEgress:
		return fmt.Sprintf("policy.egress[%d]", number-1)
	default:
		return fmt.Sprintf("policy.ingress[%d]", number-1)
	}
}

// FromIngressPolicy returns what "ingressPolicy" admits to a container of a network, or nil for maps.Open.
func FromIngressPolicy(policy maps.IngressPolicy, network maps.Network) *maps.RuleSet {
	if policy == maps.Open {
		return nil
	}
	admitted := &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.OutsidePeer, Last: lastPort}}}
	if policy == maps.SameNetwork {
		admitted.Rules = append(admitted.Rules, maps.Rule{Kind: maps.NetworkPeer, Peer: uint32(network), Last: lastPort})
	}
	admitted.Normalize()
	return admitted
}
