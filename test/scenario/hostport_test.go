package scenario

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestHostPort(t *testing.T) { hostPortsForward(t, newNetwork(t)) }

// From the outside the pod sees who asks, from another pod the gateway.
func hostPortsForward(t *testing.T, n *network) {
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	other := n.AddPod(t, "other", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
		reachAsGateway(t, other.Namespace, protocol, at(f.node, 8080), web.Namespace, f)

		// No other port leads there, and none is open on the pod's own side.
		isRefused(t, n.Outside, protocol, at(f.node, 80))
		isRefused(t, other.Namespace, protocol, at(f.node, 8081))
	})
}

// A pod may use the gateway's address for the node's.
func TestHostPortOfGateway(t *testing.T) {
	n := newNetwork(t)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		reachAsGateway(t, other.Namespace, protocol, at(f.gateway, 8080), web.Namespace, f)
	})
}

// Each protocol has its ports: one that is mapped for TCP is free for UDP.
func TestHostPortOfOneProtocol(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", portMappings(mapping{HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}))
	dns := n.AddPod(t, "dns", portMappings(mapping{HostPort: 8080, ContainerPort: 53, Protocol: "udp"}))
	inEachFamily(t, func(t *testing.T, f family) {
		serve(t, web.Namespace, "tcp", at(f.pod(web), 80))
		serve(t, dns.Namespace, "udp", at(f.pod(dns), 53))
		reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), web.Namespace)
		reachAsOneself(t, n.Outside, "udp", at(f.node, 8080), dns.Namespace)
	})
}

func TestTwoHostPortsToOnePort(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", portMappings(
		mapping{HostPort: 8080, ContainerPort: 80, Protocol: "tcp"},
		mapping{HostPort: 8081, ContainerPort: 80, Protocol: "tcp"},
		mapping{HostPort: 8080, ContainerPort: 80, Protocol: "udp"},
		mapping{HostPort: 8081, ContainerPort: 80, Protocol: "udp"},
	))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		first := connect(t, n.Outside, protocol, at(f.outside, 0), at(f.node, 8080))
		defer first.Close()
		second := connect(t, n.Outside, protocol, at(f.outside, 0), at(f.node, 8081))
		defer second.Close()
		for range 2 { // both are in use at a time
			for _, client := range []*testenv.Client{first, second} {
				if seen := ask(t, client, web.Namespace); seen != client.Local() {
					t.Errorf("the server sees %s, want %s", seen, client.Local())
				}
			}
		}
	})
}

// The node has two addresses. Two pods have the same port, each on one of them, and
// a third host address leads to neither.
func TestHostIP(t *testing.T) {
	n := newNetwork(t)
	for _, f := range families {
		addNodeAddr(t, n, f, 10)
		addNodeAddr(t, n, f, 20)
	}
	onAddr := func(last byte) map[string]any {
		var mappings []mapping
		for _, f := range families {
			for _, protocol := range []string{"tcp", "udp"} {
				hostIP := sibling(f.node, last).String()
				mappings = append(mappings, mapping{HostPort: 8080, ContainerPort: 80, Protocol: protocol, HostIP: hostIP})
			}
		}
		return portMappings(mappings...)
	}
	first, second := n.AddPod(t, "first", onAddr(1)), n.AddPod(t, "second", onAddr(10))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, first.Namespace, protocol, at(f.pod(first), 80))
		serve(t, second.Namespace, protocol, at(f.pod(second), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), first.Namespace)
		reachAsOneself(t, n.Outside, protocol, at(sibling(f.node, 10), 8080), second.Namespace)
		isRefused(t, n.Outside, protocol, at(sibling(f.node, 20), 8080))
		isRefused(t, first.Namespace, protocol, at(f.gateway, 8080))
	})
}

// One family's host address opens nothing in the other.
func TestHostIPOfOneFamily(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", portMappings(mapping{HostPort: 8080, ContainerPort: 80, Protocol: "tcp", HostIP: "0.0.0.0"}))
	serve(t, web.Namespace, "tcp", at(web.Addr4(), 80))
	serve(t, web.Namespace, "tcp", at(web.Addr6(), 80))
	reachAsOneself(t, n.Outside, "tcp", at(testenv.NodeAddr4, 8080), web.Namespace)
	isRefused(t, n.Outside, "tcp", at(testenv.NodeAddr6, 8080))
}

func addNodeAddr(t *testing.T, n *network, f family, last byte) {
	t.Helper()
	addr := sibling(f.node, last)
	bits := map[bool]int{true: 24, false: 64}[addr.Is4()]
	uplink, err := n.node().Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	ipNet := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(bits, addr.BitLen())}
	if err := n.node().Netlink().AddrAdd(uplink, &netlink.Addr{IPNet: ipNet}); err != nil {
		t.Fatalf("give the node %s: %v", addr, err)
	}
}
