package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// path is how a connection passes the node. Host port 8080 is forwarded to port 80 of the pod "web", or of the
// limited one.
type path struct {
	name           string
	client, server *testenv.Namespace
	listen, dial   netip.AddrPort // the server's own address, and the one that its client uses
}

// forwardedPath is a path through the node's FORWARD chain.
type forwardedPath struct {
	path
	clientAddr, seen netip.Addr // the client's own address, and the one that its server sees
}

// forwardedPaths returns the paths between pods and between pods and the outside.
func (n *network) forwardedPaths(f testenv.Family, a, web *testenv.Pod) []forwardedPath {
	onWeb, onOutside := at(f.Pod(web), 80), at(f.Outside, 80)
	return []forwardedPath{
		{path{"pod to pod", a.Namespace, web.Namespace, onWeb, onWeb}, f.Pod(a), f.Pod(a)},
		{path{"pod to outside", a.Namespace, n.Outside, onOutside, onOutside}, f.Pod(a), f.Node},
		{path{"outside to host port", n.Outside, web.Namespace, onWeb, at(f.Node, 8080)}, f.Outside, f.Outside},
	}
}

// forEachForwardedPath runs a subtest for each forwarded path, family and protocol.
func (n *network) forEachForwardedPath(t *testing.T, a, web *testenv.Pod, test func(t *testing.T, protocol string, p forwardedPath)) {
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		for _, p := range n.forwardedPaths(f, a, web) {
			t.Run(p.name, func(t *testing.T) { test(t, protocol, p) })
		}
	})
}

// translatedPaths returns the paths with NAT, whose connections need entries in flows.
func (n *network) translatedPaths(f testenv.Family, a, web *testenv.Pod) []path {
	onWeb, onOutside := at(f.Pod(web), 80), at(f.Outside, 80)
	return []path{
		{"pod to outside", a.Namespace, n.Outside, onOutside, onOutside},
		{"outside to host port", n.Outside, web.Namespace, onWeb, at(f.Node, 8080)},
		{"host to host port", n.node(), web.Namespace, onWeb, at(f.Loopbacks[0], 8080)},
		{"pod to host port", a.Namespace, web.Namespace, onWeb, at(f.Node, 8080)},
	}
}

// allPaths returns translatedPaths and the one between pods.
func (n *network) allPaths(f testenv.Family, a, web *testenv.Pod) []path {
	onWeb := at(f.Pod(web), 80)
	return append(n.translatedPaths(f, a, web), path{"pod to pod", a.Namespace, web.Namespace, onWeb, onWeb})
}

// limitedPaths returns the paths to and from a pod with a bandwidth limit; pod is another one.
func (n *network) limitedPaths(f testenv.Family, limited, pod *testenv.Pod) []path {
	outside, on, other := at(f.Outside, 7000), at(f.Pod(limited), 80), at(f.Pod(pod), 7000)
	return []path{
		{"to the outside", limited.Namespace, n.Outside, outside, outside},
		{"to a pod", limited.Namespace, pod.Namespace, other, other},
		{"to itself by its host port", limited.Namespace, limited.Namespace, on, at(f.Node, 8080)},
		{"from the outside", n.Outside, limited.Namespace, on, at(f.Node, 8080)},
		{"from a pod", pod.Namespace, limited.Namespace, on, on},
		{"from a pod by a host port", pod.Namespace, limited.Namespace, on, at(f.Node, 8080)},
		{"from the host", n.node(), limited.Namespace, on, on},
	}
}
