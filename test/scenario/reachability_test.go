package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestPodsReachEachOther(t *testing.T) { podsReachEachOther(t, newNetwork(t)) }

func podsReachEachOther(t *testing.T, n *network) {
	a, b := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, a.Namespace, f.Pod(b))
		ping(t, b.Namespace, f.Pod(a))

		onB := serve(t, b.Namespace, protocol, at(f.Pod(b), 0))
		reachUntranslated(t, a.Namespace, protocol, onB, b.Namespace)
		onA := serve(t, a.Namespace, protocol, at(f.Pod(a), 0))
		reachUntranslated(t, b.Namespace, protocol, onA, a.Namespace)
	})
}

// A pod reaches itself by its own address.
func TestPodReachesItself(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, pod.Namespace, f.Pod(pod))
		server := serve(t, pod.Namespace, protocol, at(f.Pod(pod), 0))
		reachUntranslated(t, pod.Namespace, protocol, server, pod.Namespace)
	})
}

func TestPodAndHostReachEachOther(t *testing.T) { podAndHostReachEachOther(t, newNetwork(t)) }

func podAndHostReachEachOther(t *testing.T, n *network) {
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		for _, host := range []netip.Addr{f.Node, f.Gateway} {
			ping(t, pod.Namespace, host)
			server := serve(t, n.node(), protocol, at(host, 0))
			reachUntranslated(t, pod.Namespace, protocol, server, n.node())
		}

		ping(t, n.node(), f.Pod(pod))
		server := serve(t, pod.Namespace, protocol, at(f.Pod(pod), 0))
		reachUntranslated(t, n.node(), protocol, server, pod.Namespace)
	})
}

// All pods share one gateway address, which each pod's device on the host has. It replies to every pod.
func TestGatewayRepliesToEveryPod(t *testing.T) {
	n := newNetwork(t)
	var pods []*testenv.Pod
	for _, id := range []string{"a", "b", "c"} {
		pods = append(pods, n.AddPod(t, id, nil))
	}
	pingGateway := func(t *testing.T, f testenv.Family) {
		for _, pod := range pods {
			ping(t, pod.Namespace, f.Gateway)
		}
	}
	forEachFamily(t, pingGateway)

	// Still after the first device with the address is gone.
	del(t, pods[0])
	pods = pods[1:]
	forEachFamily(t, pingGateway)
}
