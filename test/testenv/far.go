package testenv

import "net/netip"

// Addresses behind the outside host of a [Topology], after [Topology.AddFar].
var (
	RouterAddr4 = netip.MustParseAddr("198.18.0.2")
	RouterAddr6 = netip.MustParseAddr("2001:db8:18::2")
	FarAddr4    = netip.MustParseAddr("203.0.113.2")
	FarAddr6    = netip.MustParseAddr("2001:db8:3::2")
)

// FarName is the device of the outside host and of the router behind it that faces away from
// the node.
const FarName = "eth1"

// AddFar makes the outside host a router, with another router and a host behind it:
//
//	node eth0 - eth0 outside eth1 - eth0 router eth1 - eth0 far
//
// The link between the routers has the given MTU, or the default for 0. Both ends of a connection to
// far learn of a smaller one only from ICMP errors, which have no rate limit here.
func (t *Topology) AddFar(tb TB, mtu int) {
	tb.Helper()
	t.Router, t.Far = New(tb, "router"), New(tb, "far")
	if err := t.addFar(mtu); err != nil {
		tb.Fatalf("build the links behind the outside: %v", err)
	}
}

func (t *Topology) addFar(mtu int) error {
	toRouter := uplink{
		nodeDevice: FarName, peerDevice: UplinkName, outside: t.Router,
		node: []netip.Addr{RouterAddr4.Prev(), RouterAddr6.Prev()}, peer: []netip.Addr{RouterAddr4, RouterAddr6},
	}
	toFar := uplink{
		nodeDevice: FarName, peerDevice: UplinkName, outside: t.Far,
		node: []netip.Addr{FarAddr4.Prev(), FarAddr6.Prev()}, peer: []netip.Addr{FarAddr4, FarAddr6},
	}
	if err := (&Topology{Node: t.Outside}).connect(toRouter); err != nil {
		return err
	}
	if err := (&Topology{Node: t.Router}).connect(toFar); err != nil {
		return err
	}
	for _, ns := range []*Namespace{t.Node, t.Outside, t.Router, t.Far} {
		for name, value := range map[string]string{"net/ipv4/icmp_ratelimit": "0", "net/ipv6/icmp/ratelimit": "0"} {
			if err := ns.SetSysctl(name, value); err != nil {
				return err
			}
		}
	}
	for _, router := range []*Namespace{t.Outside, t.Router} {
		for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
			if err := router.SetSysctl(name, "1"); err != nil {
				return err
			}
		}
	}
	for _, route := range []struct {
		ns          *Namespace
		to, gateway netip.Addr
	}{
		{t.Outside, FarAddr4, RouterAddr4}, {t.Outside, FarAddr6, RouterAddr6},
		{t.Router, NodeAddr4, RouterAddr4.Prev()}, {t.Router, NodeAddr6, RouterAddr6.Prev()},
		{t.Far, NodeAddr4, FarAddr4.Prev()}, {t.Far, NodeAddr6, FarAddr6.Prev()},
		{t.Far, RouterAddr4, FarAddr4.Prev()}, {t.Far, RouterAddr6, FarAddr6.Prev()},
	} {
		bits := map[bool]int{true: prefixLen4, false: prefixLen6}[route.to.Is4()]
		prefix, err := route.to.Prefix(bits)
		if err == nil {
			err = route.ns.AddRoute(prefix, route.gateway)
		}
		if err != nil {
			return err
		}
	}
	if mtu == 0 {
		return nil
	}
	if err := t.Outside.SetMTU(FarName, mtu); err != nil {
		return err
	}
	return t.Router.SetMTU(UplinkName, mtu)
}

// SetMTU sets the MTU of a device.
func (ns *Namespace) SetMTU(device string, mtu int) error {
	link, err := ns.rtnl.LinkByName(device)
	if err != nil {
		return err
	}
	return ns.rtnl.LinkSetMTU(link, mtu)
}
