package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Traffic to the number of a host port, but not to an address of the node, passes untouched. Other
// plugins have captured it (CVE-2025-67499).

// The node routes between two networks. Its port 8080 is forwarded to a pod.
func TestTransitTraffic(t *testing.T) {
	n := newNetwork(t)
	n.AddSecondUplink(t)
	for _, f := range testenv.Families {
		n.routeBetweenOutsides(t, f)
	}
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		serve(t, n.SecondOutside, protocol, at(f.SecondOutside, 8080))
		serve(t, n.Outside, protocol, at(f.Outside, 8080))

		ping(t, n.Outside, f.SecondOutside)
		reachUntranslated(t, n.Outside, protocol, at(f.SecondOutside, 8080), n.SecondOutside)
		reachUntranslated(t, n.SecondOutside, protocol, at(f.Outside, 8080), n.Outside)
		// The host port works from both networks.
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		reachUntranslated(t, n.SecondOutside, protocol, at(f.SecondNode, 8080), web.Namespace)
	})
}

func (n *network) routeBetweenOutsides(t *testing.T, f testenv.Family) {
	t.Helper()
	if err := n.Outside.AddRoute(netip.PrefixFrom(f.SecondOutside, f.PrefixLen), f.Node); err != nil {
		t.Fatal(err)
	}
	if err := n.SecondOutside.AddRoute(netip.PrefixFrom(f.Outside, f.PrefixLen), f.SecondNode); err != nil {
		t.Fatal(err)
	}
}
