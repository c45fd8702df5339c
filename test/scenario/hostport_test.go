package scenario

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestHostPort(t *testing.T) { hostPortsForward(t, newNetwork(t)) }

// The pod sees the address of an outside client, and the gateway for another pod.
func hostPortsForward(t *testing.T, n *network) {
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	other := n.AddPod(t, "other", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		reachAsGateway(t, other.Namespace, protocol, at(f.Node, 8080), web.Namespace, f)

		// No other port is forwarded.
		wantRefused(t, n.Outside, protocol, at(f.Node, 80))
		wantRefused(t, other.Namespace, protocol, at(f.Node, 8081))
	})
}

// Two pods have the same host port on different node addresses. A third address forwards to neither.
func TestHostIP(t *testing.T) {
	n := newNetwork(t)
	for _, f := range testenv.Families {
		addNodeAddr(t, n, f, 10)
		addNodeAddr(t, n, f, 20)
	}
	onAddr := func(last byte) map[string]any {
		var mappings []mapping
		for _, f := range testenv.Families {
			for _, protocol := range []string{"tcp", "udp"} {
				hostIP := sibling(f.Node, last).String()
				mappings = append(mappings, mapping{HostPort: 8080, ContainerPort: 80, Protocol: protocol, HostIP: hostIP})
			}
		}
		return portMappings(mappings...)
	}
	first, second := n.AddPod(t, "first", onAddr(1)), n.AddPod(t, "second", onAddr(10))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, first.Namespace, protocol, at(f.Pod(first), 80))
		serve(t, second.Namespace, protocol, at(f.Pod(second), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), first.Namespace)
		reachUntranslated(t, n.Outside, protocol, at(sibling(f.Node, 10), 8080), second.Namespace)
		wantRefused(t, n.Outside, protocol, at(sibling(f.Node, 20), 8080))
		wantRefused(t, first.Namespace, protocol, at(f.Gateway, 8080))
	})
}

// addNodeAddr adds a second address to the node's uplink, which differs from the first in its last byte.
func addNodeAddr(t *testing.T, n *network, f testenv.Family, last byte) {
	t.Helper()
	addr := sibling(f.Node, last)
	uplink, err := n.node().Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	ipNet := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(f.PrefixLen, addr.BitLen())}
	if err := n.node().Netlink().AddrAdd(uplink, &netlink.Addr{IPNet: ipNet}); err != nil {
		t.Fatalf("add %s to the node: %v", addr, err)
	}
	if err := n.node().WaitUp(testenv.UplinkName); err != nil {
		t.Fatal(err)
	}
}
