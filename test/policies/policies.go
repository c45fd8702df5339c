// Package policies makes random policies, and connections that they admit or not. Tests have them judged by
// evaluators of NetworkPolicy that others wrote (../judges), and by ours.
package policies

import "net/netip"

// Case is what the judges get: the policies of containers, and connections.
type Case struct {
	Policies    map[string]Policy `json:"policies"` // by the container's name
	Connections []Connection      `json:"connections"`
}

// Connection is what one side opens. ICMP has no port.
type Connection struct {
	From     End    `json:"from"`
	To       End    `json:"to"`
	Protocol string `json:"protocol"` // tcp, udp, sctp, icmp
	Port     uint16 `json:"port,omitempty"`
}

// End is an address of a container, or of a host outside, which has no network.
type End struct {
	Name    string     `json:"name"`
	Network string     `json:"network,omitempty"`
	Addr    netip.Addr `json:"addr"`
}

// Verdict is whether the policies of both ends admit a connection. An end without a policy does.
type Verdict struct {
	Egress  bool `json:"egress"`
	Ingress bool `json:"ingress"`
}

// Policy is the value of the key "policy". A nil list of rules is an absent one.
type Policy struct {
	Ingress []Rule `json:"ingress,omitzero"`
	Egress  []Rule `json:"egress,omitzero"`
}

// Rule is a rule of either direction: only one of From and To is set.
type Rule struct {
	From  []Peer `json:"from,omitzero"`
	To    []Peer `json:"to,omitzero"`
	Ports []Port `json:"ports,omitzero"`
}

// Peer is one entry of From or To.
type Peer struct {
	CIDR        string   `json:"cidr,omitempty"`
	Except      []string `json:"except,omitempty"`
	SameNetwork bool     `json:"sameNetwork,omitempty"`
	Network     string   `json:"network,omitempty"`
}

// Port is one entry of Ports: a port of TCP if there is no protocol, and a whole protocol if there is no port.
type Port struct {
	Protocol string `json:"protocol,omitempty"`
	Port     uint16 `json:"port,omitempty"`
	EndPort  uint16 `json:"endPort,omitempty"`
}
