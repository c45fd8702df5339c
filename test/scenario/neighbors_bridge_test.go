package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// br_netfilter shows bridged packets to the rules and to conntrack at the bridge's port, before the bridge's own
// device, where the datapath translates them. In these tests it is on.

// requireBridgeNetfilter turns br_netfilter on.
func (n *network) requireBridgeNetfilter(t *testing.T) {
	t.Helper()
	testenv.Require(t, testenv.BridgeNetfilter)
	for _, name := range testenv.BridgeNetfilterSysctls {
		testenv.Must(t, n.node().SetSysctl(name, "1"))
	}
}

// strictForwarding are the rules of a host that forwards only what conntrack knows.
const strictForwarding = `table inet strict { chain forward { type filter hook forward priority 0; policy drop;
	ct state invalid drop
	ct state established,related accept
	ip saddr 10.88.0.0/24 accept; ip6 saddr fd00:88::/64 accept
	ip saddr 172.17.0.0/16 accept; ip6 saddr fd00:17::/64 accept
	ip daddr 10.88.0.0/24 tcp dport 80 accept; ip daddr 10.88.0.0/24 udp dport 80 accept
	ip6 daddr fd00:88::/64 tcp dport 80 accept; ip6 daddr fd00:88::/64 udp dport 80 accept
	ct status dnat accept
} }`

var forwardRules = map[string]string{
	"no rules":              "",
	"drops invalid":         `table inet filter { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop; } }`,
	"accepts what is known": strictForwarding,
}

// The uplink is a bridge.
func TestBridgeNetfilterOnUplink(t *testing.T) {
	bridge := testenv.UplinkKinds[0]
	for name, rules := range forwardRules {
		t.Run(name, func(t *testing.T) {
			testenv.Require(t, bridge.Feature)
			n := newNetwork(t)
			n.requireBridgeNetfilter(t)
			n.MoveUplink(t, bridge)
			n.nft(t, rules)
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			n.useUplink(t, pod)
		})
	}
}

// Another engine's bridge, whose containers are masqueraded, and have a published port.
func TestBridgeNetfilterBesideAnotherEngine(t *testing.T) {
	for name, rules := range forwardRules {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t)
			container := n.otherEngine6(t)
			n.requireBridgeNetfilter(t)
			n.nft(t, rules)
			n.nft(t, dockerRules)
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				serve(t, container, protocol, at(engineAddr[f.Name], 90))
				serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
				serve(t, n.Outside, protocol, at(f.Outside, 7000))
				for _, tc := range []struct {
					name         string
					from, server *testenv.Namespace
					to           netip.AddrPort
				}{
					{"container to outside", container, n.Outside, at(f.Outside, 7000)},
					{"container to pod", container, pod.Namespace, at(f.Pod(pod), 80)},
					{"container to host port", container, pod.Namespace, at(f.Node, 8080)},
					{"container to host port of the bridge", container, pod.Namespace, at(engineGateway[f.Name], 8080)},
					{"pod to container", pod.Namespace, container, at(engineAddr[f.Name], 90)},
					{"pod to published port", pod.Namespace, container, at(f.Node, 9090)},
					{"outside to published port", n.Outside, container, at(f.Node, 9090)},
					{"outside to host port", n.Outside, pod.Namespace, at(f.Node, 8080)},
					{"pod to outside", pod.Namespace, n.Outside, at(f.Outside, 7000)},
				} {
					if tc.from == pod.Namespace && tc.to.Port() == 9090 && *fastPath == "always" {
						continue // the stack, which always bypasses, translates the replies
					}
					t.Run(tc.name, func(t *testing.T) {
						client := connect(t, tc.from, protocol, netip.AddrPort{}, tc.to)
						defer client.Close()
						for range 20 {
							ask(t, client, tc.server)
						}
					})
				}
			})
		})
	}
}

var (
	engineAddr    = map[string]netip.Addr{"IPv4": netip.MustParseAddr("172.17.0.2"), "IPv6": netip.MustParseAddr("fd00:17::2")}
	engineGateway = map[string]netip.Addr{"IPv4": netip.MustParseAddr("172.17.0.1"), "IPv6": netip.MustParseAddr("fd00:17::1")}
)

// otherEngine6 is otherEngine with both families.
func (n *network) otherEngine6(t *testing.T) *testenv.Namespace {
	t.Helper()
	container := n.otherEngine(t)
	inside := []string{"nsenter", "--net=" + container.Path}
	n.runOnNode(t, "ip", "address", "add", "fd00:17::1/64", "dev", "br9", "nodad")
	n.runOnNode(t, append(inside, strings.Fields("ip address add fd00:17::2/64 dev eth0 nodad")...)...)
	n.runOnNode(t, append(inside, strings.Fields("ip route add default via fd00:17::1")...)...)
	for _, ns := range []*testenv.Namespace{n.node(), container} {
		device := map[bool]string{true: "br9", false: "eth0"}[ns == n.node()]
		testenv.Must(t, ns.WaitUp(device))
	}
	return container
}

// dockerRules are docker's, for both families.
const dockerRules = `
	table ip docker {
		chain post { type nat hook postrouting priority 100; policy accept; ip saddr 172.17.0.0/16 oifname != "br9" masquerade; }
		chain pre { type nat hook prerouting priority -100; policy accept;
			fib daddr type local tcp dport 9090 dnat to 172.17.0.2:90; fib daddr type local udp dport 9090 dnat to 172.17.0.2:90; }
	}
	table ip6 docker {
		chain post { type nat hook postrouting priority 100; policy accept; ip6 saddr fd00:17::/64 oifname != "br9" masquerade; }
		chain pre { type nat hook prerouting priority -100; policy accept;
			fib daddr type local tcp dport 9090 dnat to [fd00:17::2]:90; fib daddr type local udp dport 9090 dnat to [fd00:17::2]:90; }
	}`
