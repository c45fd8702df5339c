package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// newRoutedNetwork has a route to pods on the outside.
func newRoutedNetwork(t *testing.T, conflist string) *network {
	t.Helper()
	n := newNetworkWith(t, conflist)
	n.routeToPods(t)
	return n
}

// routeToPods gives the hosts outside a route to pods, in both families.
func (n *network) routeToPods(t *testing.T) {
	t.Helper()
	for _, f := range testenv.Families {
		n.RouteTo(t, f.PodSubnet)
	}
}

// Without ipMasq every server sees the pod's own address.
func TestPodWithoutMasquerade(t *testing.T) {
	n := newRoutedNetwork(t, strings.Replace(podsConflist, `"ipMasq": true`, `"ipMasq": false`, 1))
	pod := n.AddPod(t, "a", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, pod.Namespace, f.Outside)
		ping(t, n.Outside, f.Pod(pod))
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachUntranslated(t, pod.Namespace, protocol, server, n.Outside)

		serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Pod(pod), 80), pod.Namespace)
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), pod.Namespace)
	})
}

// With ipMasq, replies to an inbound connection come from the pod's own address, while the pod's outbound
// connections are masqueraded, at the same time and to the same remote.
func TestInboundToMasqueradedPod(t *testing.T) {
	n := newRoutedNetwork(t, podsConflist)
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		podServer := serve(t, pod.Namespace, protocol, at(f.Pod(pod), 0))
		outsideServer := serve(t, n.Outside, protocol, at(f.Outside, 0))
		inbound := connect(t, n.Outside, protocol, netip.AddrPort{}, podServer)
		defer inbound.Close()
		outbound := connect(t, pod.Namespace, protocol, netip.AddrPort{}, outsideServer)
		defer outbound.Close()
		for range 2 {
			ping(t, n.Outside, f.Pod(pod))
			ping(t, pod.Namespace, f.Outside)
			// A connected socket receives nothing from another address.
			if seen := ask(t, inbound, pod.Namespace); seen != inbound.Local() {
				t.Errorf("pod sees %s, want %s", seen, inbound.Local())
			}
			if seen := ask(t, outbound, n.Outside); seen.Addr() != f.Node {
				t.Errorf("outside sees %s, want the node %s", seen, f.Node)
			}
		}
	})
}

// The outside has no route to pods: it could not reply to a packet that is not masqueraded.
func TestMasquerade(t *testing.T) { podReachesOutside(t, newNetwork(t)) }

func podReachesOutside(t *testing.T, n *network) {
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, pod.Namespace, f.Outside)
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.Node)
	})
}

// Destinations in nonMasqueradeCIDRs see the pod's own address, all others the node's.
func TestNonMasqueradeCIDRs(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["198.51.100.0/24", "2001:db8:2::/64"]`))
	n.AddSecondUplink(t)
	n.routeToPods(t)
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		masqueraded := serve(t, n.Outside, protocol, at(f.Outside, 0))
		unmasqueraded := serve(t, n.SecondOutside, protocol, at(f.SecondOutside, 0))
		reachAsNode(t, pod.Namespace, protocol, masqueraded, n.Outside, f.Node)
		reachUntranslated(t, pod.Namespace, protocol, unmasqueraded, n.SecondOutside)
		ping(t, pod.Namespace, f.SecondOutside)
	})
}
