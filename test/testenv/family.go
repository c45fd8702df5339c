package testenv

import "net/netip"

// Family is IPv4 or IPv6: its addresses of a [Topology], and what else differs between the two.
type Family struct {
	Name       string // "IPv4" or "IPv6"
	PrefixLen  int    // of the topology's subnets
	Forwarding string // sysctl that turns the node into a router

	Node, Outside             netip.Addr
	SecondNode, SecondOutside netip.Addr // after [Topology.AddSecondUplink]
	Router, Far               netip.Addr // after [Topology.AddFar]
	Loopbacks                 []netip.Addr

	// PodSubnet is for networks of pods; Gateway is its first address.
	PodSubnet netip.Prefix
	Gateway   netip.Addr
}

// The two families.
var (
	IPv4 = Family{
		Name: "IPv4", PrefixLen: prefixLen4, Forwarding: "net/ipv4/ip_forward",
		Node: NodeAddr4, Outside: OutsideAddr4, SecondNode: SecondNodeAddr4, SecondOutside: SecondOutsideAddr4,
		Router: RouterAddr4, Far: FarAddr4, Loopbacks: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.5.6.7")},
		PodSubnet: netip.MustParsePrefix("10.88.0.0/24"), Gateway: netip.MustParseAddr("10.88.0.1"),
	}
	IPv6 = Family{
		Name: "IPv6", PrefixLen: prefixLen6, Forwarding: "net/ipv6/conf/all/forwarding",
		Node: NodeAddr6, Outside: OutsideAddr6, SecondNode: SecondNodeAddr6, SecondOutside: SecondOutsideAddr6,
		Router: RouterAddr6, Far: FarAddr6, Loopbacks: []netip.Addr{netip.IPv6Loopback()},
		PodSubnet: netip.MustParsePrefix("fd00:88::/64"), Gateway: netip.MustParseAddr("fd00:88::1"),
	}
	Families = []Family{IPv4, IPv6}
)

// Is4 reports whether f is IPv4.
func (f Family) Is4() bool { return f.Node.Is4() }

// Pod returns the pod's first address of the family, or the zero Addr.
func (f Family) Pod(p *Pod) netip.Addr {
	if f.Is4() {
		return p.Addr4()
	}
	return p.Addr6()
}
