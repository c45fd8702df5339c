package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The outside of these stories has a route to pods.

func newRoutedNetwork(t *testing.T, conflist string) *network {
	t.Helper()
	n := newNetworkOf(t, conflist)
	for _, f := range families {
		n.RouteTo(t, f.podSubnet)
	}
	return n
}

// Without ipMasq a pod is itself wherever it goes.
func TestPodWithoutMasquerade(t *testing.T) {
	n := newRoutedNetwork(t, strings.Replace(podsConflist, `"ipMasq": true`, `"ipMasq": false`, 1))
	pod := n.AddPod(t, "a", mapBoth(8080, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		ping(t, pod.Namespace, f.outside)
		ping(t, n.Outside, f.pod(pod))
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		reachAsOneself(t, pod.Namespace, protocol, server, n.Outside)

		serve(t, pod.Namespace, protocol, at(f.pod(pod), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.pod(pod), 80), pod.Namespace)
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), pod.Namespace)
	})
}

// With ipMasq, who opens a connection to a pod's own address is answered from it; what
// the pod opens itself is masqueraded all the same, at the same time, even to the
// same remote.
func TestMasqueradedPodIsReachedDirectly(t *testing.T) {
	n := newRoutedNetwork(t, podsConflist)
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		onPod := serve(t, pod.Namespace, protocol, at(f.pod(pod), 0))
		onOutside := serve(t, n.Outside, protocol, at(f.outside, 0))
		inwards := connect(t, n.Outside, protocol, netip.AddrPort{}, onPod)
		defer inwards.Close()
		outwards := connect(t, pod.Namespace, protocol, netip.AddrPort{}, onOutside)
		defer outwards.Close()
		for range 2 {
			ping(t, n.Outside, f.pod(pod))
			ping(t, pod.Namespace, f.outside)
			// A connected socket hears no answer from another address.
			if seen := ask(t, inwards, pod.Namespace); seen != inwards.Local() {
				t.Errorf("the pod sees %s, want %s", seen, inwards.Local())
			}
			if seen := ask(t, outwards, n.Outside); seen.Addr() != f.node {
				t.Errorf("the outside sees %s, want the node %s", seen, f.node)
			}
		}
	})
}

// A pod with a mapped port is reached by the node's address and by its own alike, also by
// one client.
func TestMappedPodIsReachedDirectly(t *testing.T) {
	n := newRoutedNetwork(t, podsConflist)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		byNode := connect(t, n.Outside, protocol, netip.AddrPort{}, at(f.node, 8080))
		defer byNode.Close()
		directly := connect(t, n.Outside, protocol, netip.AddrPort{}, at(f.pod(web), 80))
		defer directly.Close()
		for range 2 {
			for _, client := range []*testenv.Client{byNode, directly} {
				if seen := ask(t, client, web.Namespace); seen != client.Local() {
					t.Errorf("the pod sees %s, want %s", seen, client.Local())
				}
			}
		}
	})
}
