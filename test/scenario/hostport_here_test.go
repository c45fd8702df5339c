package scenario

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Host ports for clients on the node: its own processes, and pods.

// loopbacks are addresses by which a host reaches itself, and nobody else.
func (f family) loopbacks() []netip.Addr {
	if f.node.Is4() {
		return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.5.6.7")}
	}
	return []netip.Addr{netip.IPv6Loopback()}
}

func TestHostPortFromHost(t *testing.T) { hostPortsOpenToHost(t, newNetwork(t)) }

func hostPortsOpenToHost(t *testing.T, n *network) {
	web := n.AddPod(t, "here", mapBoth(8085, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		for _, addr := range append(f.loopbacks(), f.node, f.gateway) {
			reachAsGateway(t, n.node(), protocol, at(addr, 8085), web.Namespace, f)
		}
		isRefused(t, n.node(), protocol, at(f.loopbacks()[0], 80))
	})
}

// A client's socket that is not connected must be able to tell whose answer it has: it
// comes from the address that was asked, whoever asks.
func TestHostPortAnswersFromAddressAsked(t *testing.T) {
	n := newNetwork(t)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		addNodeAddr(t, n, f, 40)
		serve(t, web.Namespace, "udp", at(f.pod(web), 80))
		ofNode := []netip.Addr{f.node, sibling(f.node, 40)}
		for from, addrs := range map[*testenv.Namespace][]netip.Addr{
			n.node():        append(append(f.loopbacks(), ofNode...), f.gateway),
			other.Namespace: append(ofNode, f.gateway),
			web.Namespace:   append(ofNode, f.gateway),
			n.Outside:       ofNode,
		} {
			answersFromAddressesAsked(t, from, addrs, 8080)
		}
	})
}

// answersFromAddressesAsked asks a server at several addresses by one socket, often enough that
// the datapath has found the short way of each.
func answersFromAddressesAsked(t *testing.T, from *testenv.Namespace, addrs []netip.Addr, port uint16) {
	t.Helper()
	unspecified := netip.IPv4Unspecified()
	if addrs[0].Is6() {
		unspecified = netip.IPv6Unspecified()
	}
	socket := listenPacket(t, from, at(unspecified, 0))
	for _, addr := range slices.Repeat(addrs, 4) {
		sendTo(t, socket, at(addr, port), "1 hello")
		if _, answerer := receiveFrom(t, socket); answerer != at(addr, port) {
			t.Errorf("%s asks %s: the answer comes from %s", from.Name, at(addr, port), answerer)
		}
	}
}

// A port of the loopback addresses is for processes of the host alone.
func TestHostIPLoopback(t *testing.T) {
	n := newNetwork(t)
	var mappings []mapping
	for _, f := range families {
		for _, protocol := range []string{"tcp", "udp"} {
			mappings = append(mappings, mapping{
				HostPort: 8080, ContainerPort: 80, Protocol: protocol, HostIP: f.loopbacks()[0].String(),
			})
		}
	}
	web, other := n.AddPod(t, "web", portMappings(mappings...)), n.AddPod(t, "other", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		reachAsGateway(t, n.node(), protocol, at(f.loopbacks()[0], 8080), web.Namespace, f)
		isRefused(t, n.node(), protocol, at(f.node, 8080))
		isRefused(t, n.Outside, protocol, at(f.node, 8080))
		for _, pod := range []*testenv.Pod{web, other} {
			isRefused(t, pod.Namespace, protocol, at(f.node, 8080))
			isRefused(t, pod.Namespace, protocol, at(f.gateway, 8080))
			isRefused(t, pod.Namespace, protocol, at(f.loopbacks()[0], 8080))
		}
	})
}

// Pods reach the ports of each other and of themselves by the node's addresses, and
// not by a loopback address, which is the pod's own.
func TestHostPortFromPods(t *testing.T) {
	n := newNetwork(t)
	web, db := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "db", mapBoth(8081, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		serve(t, db.Namespace, protocol, at(f.pod(db), 80))
		for _, addr := range []netip.Addr{f.node, f.gateway} {
			for _, client := range []*testenv.Pod{web, db} {
				reachAsGateway(t, client.Namespace, protocol, at(addr, 8080), web.Namespace, f)
				reachAsGateway(t, client.Namespace, protocol, at(addr, 8081), db.Namespace, f)
			}
		}
		for _, loopback := range f.loopbacks() {
			isRefused(t, web.Namespace, protocol, at(loopback, 8080))
			isRefused(t, web.Namespace, protocol, at(loopback, 8081))
		}
	})
}

// Nobody but the host itself has business with its loopback addresses (CVE-2020-8558): not
// who is on the wire with it, and not a pod that forges packets.
func TestLoopbackIsNotLetInFromWire(t *testing.T) {
	n := newNetwork(t)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		server := listenPacket(t, web.Namespace, at(f.pod(web), 80))
		for _, from := range []struct {
			ns     *testenv.Namespace
			addr   netip.Addr
			nodeIs testenv.MAC
		}{
			{n.Outside, f.outside, n.node().MACOf(t, testenv.UplinkName)},
			{other.Namespace, f.pod(other), n.node().MACOf(t, other.Result.Interfaces[0].Name)},
		} {
			var frames [][]byte
			for i, to := range append(f.loopbacks(), f.node) { // the last one is let in
				payload := "forged"
				if to == f.node {
					payload = "honest"
				}
				packet := testenv.UDPPacket(at(from.addr, uint16(6000+i)), at(to, 8080), payload)
				packet.SrcMAC, packet.DstMAC = from.ns.MACOf(t, testenv.UplinkName), from.nodeIs
				frames = append(frames, packet.MustBuild())
			}
			if err := from.ns.SendFrames(testenv.UplinkName, frames...); err != nil {
				t.Fatal(err)
			}
			if payload, client := receiveFrom(t, server); payload != "honest" {
				t.Errorf("the pod got %q of %s, by a packet to a loopback address", payload, client)
			}
		}
	})
}
