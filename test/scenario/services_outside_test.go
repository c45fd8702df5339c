package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const nodePort = 30080

// nodePort sends what clients of the outside send to the node's port on to a pod, as kube-proxy's rules do. With masquerade,
// the pod sees the node's address, as with externalTrafficPolicy: Cluster.
func (n *network) nodePort(t *testing.T, f testenv.Family, pod *testenv.Pod, masquerade bool) {
	t.Helper()
	snat := ""
	if masquerade {
		snat = "IP daddr POD masquerade;"
	}
	n.nft(t, strings.NewReplacer("IP", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name],
		"NODE", f.Node.String(), "BACKEND", at(f.Pod(pod), 80).String(), "POD", f.Pod(pod).String(),
	).Replace(`table IP nodeport {}
		delete table IP nodeport
		table IP nodeport {
			chain ports { type nat hook prerouting priority -100; policy accept;
				IP daddr NODE tcp dport 30080 dnat to BACKEND; IP daddr NODE udp dport 30080 dnat to BACKEND
			}
			chain clients { type nat hook postrouting priority 100; policy accept; `+snat+` }
			chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop; }
		}`))
}

// forEachNodePort runs a test for each protocol, with and without masquerading the clients.
func (n *network) forEachNodePort(t *testing.T, pod *testenv.Pod, test func(t *testing.T, f testenv.Family, protocol string, masquerade bool)) {
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		for name, masquerade := range map[string]bool{"client's address": false, "masqueraded": true} {
			n.nodePort(t, f, pod, masquerade)
			t.Run(name, func(t *testing.T) { test(t, f, protocol, masquerade) })
		}
	})
}

// Clients of the outside reach a pod behind the node's port past the stack, in both directions, until the host decides otherwise.
func TestNodePortsAreOffloaded(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	web, other := n.AddPod(t, "web", nil), n.AddPod(t, "other", nil)
	for _, f := range testenv.Families {
		for _, pod := range []*testenv.Pod{web, other} {
			for _, protocol := range []string{"tcp", "udp"} {
				serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
			}
		}
	}
	n.forEachNodePort(t, web, func(t *testing.T, f testenv.Family, protocol string, masquerade bool) {
		port := at(f.Node, nodePort)
		first := connect(t, n.Outside, protocol, netip.AddrPort{}, port)
		n.eventuallyOffloads(t, f, first, web.Namespace)
		if seen := ask(t, first, web.Namespace); (seen != first.Local()) != masquerade {
			t.Errorf("the pod sees %s", seen)
		}
		n.wantTranslatedByHost(t, []string{"web"}, protocol, first.Local(), port, at(f.Pod(web), 80))
		n.wantTraced(t, first, port, protocol, "delivered to web, as ", "sent by eth0, as "+port.String()+" > "+first.Local().String())
		testenv.Must(t, first.Reset())
		client := connect(t, n.Outside, protocol, first.Local(), port)
		defer client.Close()
		if protocol == "tcp" && n.forwardsOf(t, f, client, web.Namespace) == 0 {
			t.Error("the port's next connection bypasses the stack from its beginning")
		}
		n.eventuallyOffloads(t, f, client, web.Namespace)
		n.wantCloseSeen(t, n.Outside, protocol, port)

		n.nodePort(t, f, other, masquerade)
		n.wantStillOffloaded(t, f, client, web.Namespace)
		n.forget(t, client.Local())
		n.wantRetargeted(t, protocol, client, other)
	})
	third, large := n.AddPod(t, "third", nil), sizeOf(8*mebibyte)
	for _, f := range testenv.Families {
		for _, masquerade := range []bool{false, true} {
			n.nodePort(t, f, third, masquerade)
			upload(large)(t, n.Outside, third.Namespace, at(f.Pod(third), 80), at(f.Node, nodePort))
			download(large)(t, n.Outside, third.Namespace, at(f.Pod(third), 80), at(f.Node, nodePort))
		}
	}
}

// A client of a node port is judged by its own address, and not as the host if the host's rules masquerade it: through the stack,
// and past it, where stricter rules end its connection.
func TestPolicyOfNodePorts(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	web := n.AddPod(t, "web", nil)
	const (
		client = `{"ingress": [{"from": [{"cidr": "192.0.2.2/32"}, {"cidr": "2001:db8:1::2/128"}]}]}`
		others = `{"ingress": [{"from": [{"cidr": "192.0.2.1/32"}, {"cidr": "2001:db8:1::1/128"}, {"cidr": "10.88.0.0/24"}, {"cidr": "fd00:88::/64"}]}]}`
	)
	n.forEachNodePort(t, web, func(t *testing.T, f testenv.Family, protocol string, _ bool) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		for policy, admitted := range map[string]bool{client: true, others: false} {
			n.setPolicy(t, web, policy)
			n.wantProbe(t, protocol+"30080", n.Outside, web.Namespace, f.Node, web, admitted, reasonPolicy)
		}
		n.setPolicy(t, web, client)
		running := connect(t, n.Outside, protocol, netip.AddrPort{}, at(f.Node, nodePort))
		defer running.Close()
		n.eventuallyOffloads(t, f, running, web.Namespace)
		acknowledged(t, n.Outside, web.Namespace)
		n.setPolicy(t, web, others)
		n.wantEnded(t, others, running, web, reasonPolicy)
	})
}
