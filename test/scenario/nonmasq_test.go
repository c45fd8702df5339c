package scenario

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

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
