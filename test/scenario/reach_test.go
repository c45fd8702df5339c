package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestPodsReachEachOther(t *testing.T) { podsReachEachOther(t, newNetwork(t)) }

func podsReachEachOther(t *testing.T, n *network) {
	a, b := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		ping(t, a.Namespace, f.pod(b))
		ping(t, b.Namespace, f.pod(a))

		onB := serve(t, b.Namespace, protocol, at(f.pod(b), 0))
		reachAsOneself(t, a.Namespace, protocol, onB, b.Namespace)
		onA := serve(t, a.Namespace, protocol, at(f.pod(a), 0))
		reachAsOneself(t, b.Namespace, protocol, onA, a.Namespace)
	})
}

// A pod reaches itself by its own address without leaving its namespace.
func TestPodReachesItself(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		ping(t, pod.Namespace, f.pod(pod))
		server := serve(t, pod.Namespace, protocol, at(f.pod(pod), 0))
		reachAsOneself(t, pod.Namespace, protocol, server, pod.Namespace)
	})
}

func TestPodAndHostReachEachOther(t *testing.T) { podAndHostReachEachOther(t, newNetwork(t)) }

func podAndHostReachEachOther(t *testing.T, n *network) {
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		for _, host := range []netip.Addr{f.node, f.gateway} {
			ping(t, pod.Namespace, host)
			server := serve(t, n.node(), protocol, at(host, 0))
			reachAsOneself(t, pod.Namespace, protocol, server, n.node())
		}

		ping(t, n.node(), f.pod(pod))
		server := serve(t, pod.Namespace, protocol, at(f.pod(pod), 0))
		reachAsOneself(t, n.node(), protocol, server, pod.Namespace)
	})
}

// Forwarding is off on a fresh machine. The first ADD turns it on for the families
// of its pod.
func TestFirstAddTurnsForwardingOn(t *testing.T) {
	n := newNetwork(t)
	forwarding := []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"}
	check := func(want string) {
		t.Helper()
		for _, name := range forwarding {
			if value, err := n.node().Sysctl(name); err != nil || value != want {
				t.Errorf("%s is %q (%v), want %s", name, value, err, want)
			}
		}
	}
	check("0")
	n.AddPod(t, "a", nil)
	check("1")
}

// Pods have one gateway, whose address stands on each one's device. It answers each.
func TestGatewayAnswersEveryPod(t *testing.T) {
	n := newNetwork(t)
	var pods []*testenv.Pod
	for _, id := range []string{"a", "b", "c"} {
		pods = append(pods, n.AddPod(t, id, nil))
	}
	answersAll := func(t *testing.T, f family) {
		for _, pod := range pods {
			ping(t, pod.Namespace, f.gateway)
		}
	}
	inEachFamily(t, answersAll)

	// Also when the first device with the address is gone.
	del(t, pods[0])
	pods = pods[1:]
	inEachFamily(t, answersAll)
}
