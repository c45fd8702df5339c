package scenario

import (
	"net/netip"
	"testing"
)

// Traffic with a mapped port in it that is not for an address of the node passes
// untouched. Other plugins took it (CVE-2025-67499).

// The node routes between two networks; a pod has port 8080 of the node.
func TestRoutedTrafficIsLeftAlone(t *testing.T) {
	n := newNetwork(t)
	n.AddSecondUplink(t)
	for _, f := range families {
		n.routeBetweenOutsides(t, f)
	}
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		serve(t, n.SecondOutside, protocol, at(f.secondOutside, 8080))
		serve(t, n.Outside, protocol, at(f.outside, 8080))

		ping(t, n.Outside, f.secondOutside)
		reachAsOneself(t, n.Outside, protocol, at(f.secondOutside, 8080), n.SecondOutside)
		reachAsOneself(t, n.SecondOutside, protocol, at(f.outside, 8080), n.Outside)
		// While the port itself works, from both sides.
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
		reachAsOneself(t, n.SecondOutside, protocol, at(f.secondNode, 8080), web.Namespace)
	})
}

func (n *network) routeBetweenOutsides(t *testing.T, f family) {
	t.Helper()
	bits := map[bool]int{true: 24, false: 64}[f.node.Is4()]
	if err := n.Outside.AddRoute(netip.PrefixFrom(f.secondOutside, bits), f.node); err != nil {
		t.Fatal(err)
	}
	if err := n.SecondOutside.AddRoute(netip.PrefixFrom(f.outside, bits), f.secondNode); err != nil {
		t.Fatal(err)
	}
}

// A pod asks a server outside on a port that another pod has on the node, as everybody
// does who maps port 443.
func TestPodReachesMappedPortOutside(t *testing.T) {
	n := newNetwork(t)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		serve(t, n.Outside, protocol, at(f.outside, 8080))
		reachAsNode(t, other.Namespace, protocol, at(f.outside, 8080), n.Outside, f.node)
		reachAsNode(t, web.Namespace, protocol, at(f.outside, 8080), n.Outside, f.node)
	})
}

// A pod asks another pod on a port that a third has on the node.
func TestPodReachesMappedPortOfPod(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "web", mapBoth(8080, 80))
	a, b := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, b.Namespace, protocol, at(f.pod(b), 8080))
		reachAsOneself(t, a.Namespace, protocol, at(f.pod(b), 8080), b.Namespace)
		reachAsOneself(t, n.node(), protocol, at(f.pod(b), 8080), b.Namespace)
	})
}
