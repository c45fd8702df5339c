package scenario

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Host ports for clients on the node: its own processes, and pods.

func TestHostPortFromHost(t *testing.T) { hostPortsFromHost(t, newNetwork(t)) }

func hostPortsFromHost(t *testing.T, n *network) {
	web := n.AddPod(t, "hairpin", mapBoth(8085, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		for _, addr := range slices.Concat(f.Loopbacks, []netip.Addr{f.Node, f.Gateway}) {
			reachAsGateway(t, n.node(), protocol, at(addr, 8085), web.Namespace, f)
		}
		wantRefused(t, n.node(), protocol, at(f.Loopbacks[0], 80))
	})
}

// A reply comes from the address that the client has sent to, or an unconnected socket could not match it
// to its request.
func TestHostPortReplySource(t *testing.T) {
	n := newNetwork(t)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		addNodeAddr(t, n, f, 40)
		serve(t, web.Namespace, "udp", at(f.Pod(web), 80))
		nodeAddrs := []netip.Addr{f.Node, sibling(f.Node, 40)}
		for from, addrs := range map[*testenv.Namespace][]netip.Addr{
			n.node():        slices.Concat(f.Loopbacks, nodeAddrs, []netip.Addr{f.Gateway}),
			other.Namespace: append(nodeAddrs, f.Gateway),
			web.Namespace:   append(nodeAddrs, f.Gateway),
			n.Outside:       nodeAddrs,
		} {
			wantReplySource(t, from, addrs, 8080)
		}
	})
}

// wantReplySource sends to a server at several addresses from one socket, often enough to use the forwarding
// cache for each.
func wantReplySource(t *testing.T, from *testenv.Namespace, addrs []netip.Addr, port uint16) {
	t.Helper()
	socket := listenPacket(t, from, at(testenv.Unspecified(addrs[0]), 0))
	for _, addr := range slices.Repeat(addrs, 4) {
		sendTo(t, socket, at(addr, port), "1 hello")
		if _, source := receiveFrom(t, socket); source != at(addr, port) {
			t.Errorf("%s to %s: got a reply from %s, want it from the same address", from.Name, at(addr, port), source)
		}
	}
}

// Pods reach each other's host ports and their own by the node's addresses. A loopback address is the pod's
// own.
func TestHostPortFromPods(t *testing.T) {
	n := newNetwork(t)
	web, db := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "db", mapBoth(8081, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		serve(t, db.Namespace, protocol, at(f.Pod(db), 80))
		for _, addr := range []netip.Addr{f.Node, f.Gateway} {
			for _, client := range []*testenv.Pod{web, db} {
				reachAsGateway(t, client.Namespace, protocol, at(addr, 8080), web.Namespace, f)
				reachAsGateway(t, client.Namespace, protocol, at(addr, 8081), db.Namespace, f)
			}
		}
		for _, loopback := range f.Loopbacks {
			wantRefused(t, web.Namespace, protocol, at(loopback, 8080))
			wantRefused(t, web.Namespace, protocol, at(loopback, 8081))
		}
	})
}

// A socket of the host that has the number of a host port by chance gets the replies to what it sends, though it is not connected.
func TestHostSocketBesideHostPort(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := listenPacket(t, n.Outside, at(f.Outside, 53))
		client := listenPacket(t, n.node(), at(f.Node, 8080))
		for range 3 {
			sendTo(t, client, at(f.Outside, 53), "question")
			_, from := receiveFrom(t, server)
			sendTo(t, server, from, "answer")
			if _, from := receiveFrom(t, client); from != at(f.Outside, 53) {
				t.Errorf("reply from %s, want %s", from, at(f.Outside, 53))
			}
		}
	})
}

// A datagram of the host that is too long for the pod's interface is refused, not lost without a trace.
func TestLongDatagramToHostPort(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := listenPacket(t, web.Namespace, at(f.Pod(web), 80))
		for _, addr := range append(slices.Clone(f.Loopbacks), f.Node) {
			client, err := n.node().Dial(testenv.Context(t), "udp", at(addr, 8080))
			testenv.Must(t, err)
			defer client.Close()
			testenv.Must(t, client.SetReadDeadline(time.Now().Add(testenv.Timeout)))
			for _, length := range []int{4000, 1000} {
				_, err := client.Write(make([]byte, length))
				testenv.Must(t, err)
				if length > 1500 {
					_, err = client.Read(make([]byte, 1))
					if !errors.Is(err, syscall.ECONNREFUSED) {
						t.Errorf("%d bytes to %s: %v, want a refusal", length, addr, err)
					}
				} else if payload, _ := receiveFrom(t, server); len(payload) != length {
					t.Errorf("got %d bytes, want %d", len(payload), length)
				}
			}
		}
	})
}

// Packets to loopback addresses are accepted neither from the wire nor from a pod that forges them
// (CVE-2020-8558).
func TestLoopbackFromWire(t *testing.T) {
	n := newNetwork(t)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := listenPacket(t, web.Namespace, at(f.Pod(web), 80))
		for _, from := range []struct {
			ns      *testenv.Namespace
			addr    netip.Addr
			nextHop testenv.MAC
		}{
			{n.Outside, f.Outside, n.node().MACOf(t, testenv.UplinkName)},
			{other.Namespace, f.Pod(other), n.node().MACOf(t, other.Result.Interfaces[0].Name)},
		} {
			var frames [][]byte
			for i, to := range slices.Concat(f.Loopbacks, []netip.Addr{f.Node}) { // the last packet is accepted
				payload := "forged"
				if to == f.Node {
					payload = "genuine"
				}
				packet := testenv.UDPPacket(at(from.addr, uint16(6000+i)), at(to, 8080), payload)
				packet.SrcMAC, packet.DstMAC = from.ns.MACOf(t, testenv.UplinkName), from.nextHop
				frames = append(frames, packet.MustBuild())
			}
			testenv.Must(t, from.ns.SendFrames(testenv.UplinkName, frames...))
			if payload, client := receiveFrom(t, server); payload != "genuine" {
				t.Errorf("pod: got %q from %s, want only %q", payload, client, "genuine")
			}
		}
	})
}

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
	testenv.Must(t, err)
	ipNet := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(f.PrefixLen, addr.BitLen())}
	if err := n.node().Netlink().AddrAdd(uplink, &netlink.Addr{IPNet: ipNet}); err != nil {
		t.Fatalf("add %s to the node: %v", addr, err)
	}
	testenv.Must(t, n.node().WaitUp(testenv.UplinkName))
}
