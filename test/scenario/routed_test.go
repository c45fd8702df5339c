package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// In these tests the outside has a route to pods.

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
