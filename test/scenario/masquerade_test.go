package scenario

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// In these tests the outside has no route to pods: it could not reply to a packet that is not masqueraded.

func TestMasquerade(t *testing.T) { podReachesOutside(t, newNetwork(t)) }

func podReachesOutside(t *testing.T, n *network) {
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, pod.Namespace, f.Outside)
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.Node)
	})
}
