package scenario

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// delegatingTo returns an ebpfnet that gets its addresses from this IPAM plugin.
func delegatingTo(ipam string) string {
	return `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true, "ips": true}, "ipam": ` + ipam + `}`
}

// The reference plugin static assigns addresses and routes, with gateways and without.
func TestStaticIPAM(t *testing.T) {
	for name, gateways := range map[string][2]string{
		"with gateways":    {`, "gateway": "10.88.0.254"`, `, "gateway": "fd00:88::fe"`},
		"without gateways": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/static")
			n := newNetworkWith(t, allVerbs(conflistOf(delegatingTo(fmt.Sprintf(`{"type": "static",
				"addresses": [{"address": "10.88.0.7/24"%s}, {"address": "fd00:88::7/64"%s}],
				"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}`, gateways[0], gateways[1])))))
			if err := n.Status(testenv.Context(t)); err != nil {
				t.Errorf("STATUS: %v", err)
			}
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			if pod.Addr4() != netip.MustParseAddr("10.88.0.7") || pod.Addr6() != netip.MustParseAddr("fd00:88::7") {
				t.Errorf("addresses: got %s and %s, want 10.88.0.7 and fd00:88::7", pod.Addr4(), pod.Addr6())
			}
			wantCheck(t, pod)
			if err := n.GC(testenv.Context(t), attachmentOf(pod)); err != nil {
				t.Errorf("GC: %v", err)
			}
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				ping(t, pod.Namespace, f.Outside)
				outside := serve(t, n.Outside, protocol, at(f.Outside, 0))
				reachAsNode(t, pod.Namespace, protocol, outside, n.Outside, f.Node)
				serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
				reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), pod.Namespace)
				reach(t, n.node(), protocol, at(f.Loopbacks[0], 8080), pod.Namespace)
				reach(t, pod.Namespace, protocol, at(f.Node, 8080), pod.Namespace)
			})
		})
	}
}
