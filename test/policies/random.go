package policies

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
)

// Population is who can connect: each address of a container, and of hosts outside.
type Population []End

const connectionsPerCase = 4

// Random returns a case in which one or two containers have policies, and all connections have an end there.
//
// The node is not an end, nor has a container a connection to itself: those pass whatever the policies are, which
// the API leaves to implementations or does not say.
func (p Population) Random(r *rand.Rand) Case {
	c := Case{Policies: map[string]Policy{}}
	for range 1 + r.IntN(2) {
		end := p.pick(r, End.isContainer)
		c.Policies[end.Name] = Policy{Ingress: p.rules(r, from), Egress: p.rules(r, to)}
	}
	for len(c.Connections) < connectionsPerCase {
		policed := p.pick(r, func(e End) bool { _, ok := c.Policies[e.Name]; return ok })
		peer := p.pick(r, func(e End) bool { return e.Name != policed.Name && e.Addr.Is4() == policed.Addr.Is4() })
		connection := Connection{From: policed, To: peer, Protocol: oneOf(r, "tcp", "udp", "sctp", "icmp")}
		if r.IntN(2) == 0 {
			connection.From, connection.To = peer, policed
		}
		if connection.Protocol != "icmp" {
			connection.Port = port(r)
		}
		c.Connections = append(c.Connections, connection)
	}
	return c
}

func (e End) isContainer() bool { return e.Network != "" }

// pick returns a random end with a property, which some end must have.
func (p Population) pick(r *rand.Rand, has func(End) bool) End {
	for {
		if end := oneOf(r, p...); has(end) {
			return end
		}
	}
}

func from(peers []Peer, ports []Port) Rule { return Rule{From: peers, Ports: ports} }
func to(peers []Peer, ports []Port) Rule   { return Rule{To: peers, Ports: ports} }

// rules returns the rules of one direction: absent, none, or some.
func (p Population) rules(r *rand.Rand, rule func([]Peer, []Port) Rule) []Rule {
	switch r.IntN(16) {
	case 0, 1, 2:
		return nil
	case 3:
		return []Rule{}
	}
	return several(r, 1, 4, func() Rule {
		var peers []Peer
		var ports []Port
		if r.IntN(12) != 0 {
			peers = several(r, 0, 3, func() Peer { return p.peer(r) })
		}
		if r.IntN(3) != 0 {
			ports = several(r, 0, 3, func() Port { return portEntry(r) })
		}
		return rule(peers, ports)
	})
}

func (p Population) peer(r *rand.Rand) Peer {
	switch r.IntN(8) {
	case 0:
		return Peer{SameNetwork: true}
	case 1, 2:
		return Peer{Network: oneOf(r, append(p.networks(), "nobody")...)}
	}
	cidr := prefix(r, oneOf(r, p...).Addr, 0)
	peer := Peer{CIDR: cidr.String()}
	for range r.IntN(4) {
		if end := p.pick(r, func(e End) bool { return cidr.Contains(e.Addr) }); !cidr.IsSingleIP() {
			peer.Except = append(peer.Except, prefix(r, end.Addr, cidr.Bits()+1).String())
		}
	}
	return peer
}

// networks returns the names of all networks.
func (p Population) networks() []string {
	names := map[string]bool{}
	for _, end := range p {
		if end.isContainer() {
			names[end.Network] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// prefix returns one around the address: half of them separate addresses that are close to each other.
func prefix(r *rand.Rand, addr netip.Addr, least int) netip.Prefix {
	bits := least + r.IntN(addr.BitLen()-least+1)
	if r.IntN(2) == 0 {
		bits = max(bits, addr.BitLen()-r.IntN(4))
	}
	return netip.PrefixFrom(addr, bits).Masked()
}

func portEntry(r *rand.Rand) Port {
	entry := Port{Protocol: oneOf(r, "", "tcp", "udp", "sctp")}
	if entry.Protocol == "" || r.IntN(6) != 0 {
		entry.Port = port(r)
	}
	if last := port(r); entry.Port != 0 && last >= entry.Port && r.IntN(2) == 0 {
		entry.EndPort = last
	}
	return entry
}

// port returns one of few ports, so that rules and connections meet, and both sides of the limits of ranges occur.
func port(r *rand.Rand) uint16 {
	return oneOf[uint16](r, 1, 2, 53, 79, 80, 81, 1023, 1024, 4095, 4096, 8080, 32767, 32768, 65534, 65535)
}

func oneOf[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// several returns least to most values.
func several[T any](r *rand.Rand, least, most int, value func() T) []T {
	values := make([]T, least+r.IntN(most-least+1))
	for i := range values {
		values[i] = value()
	}
	return values
}
