package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Policy routing: rules that send what pods send by the second uplink, while the main table's default route is on
// the first one. Connections must leave by the uplink that the stack would choose, from that uplink's address, with
// their first packet and with all others.

// policyRules are arguments of `ip rule`, `ip route` and nft. IP is ip or ip6.
type policyRules struct {
	name     string
	commands string
	rules    string
}

var policies = []policyRules{
	{name: "from", commands: `
		ip FAMILY route add default via GATEWAY dev DEVICE table 100
		ip FAMILY rule add from PODS lookup 100`},
	{name: "destination port", commands: `
		ip FAMILY route add default via GATEWAY dev DEVICE table 100
		ip FAMILY rule add ipproto tcp dport 7000 lookup 100
		ip FAMILY rule add ipproto udp dport 7000 lookup 100`},
	{name: "fwmark", commands: `
		ip FAMILY route add default via GATEWAY dev DEVICE table 100
		ip FAMILY rule add fwmark 0x64 lookup 100`,
		rules: `table IP marks { chain pre { type filter hook prerouting priority -150; policy accept; IP saddr PODS meta mark set 0x64; } }`},
	{name: "fwmark of the connection", commands: `
		ip FAMILY route add default via GATEWAY dev DEVICE table 100
		ip FAMILY rule add fwmark 0x64 lookup 100`,
		rules: `table IP marks { chain pre { type filter hook prerouting priority -150; policy accept;
			IP saddr PODS ct state new ct mark set 0x64; IP saddr PODS meta mark set ct mark; } }`},
	{name: "like wg-quick", commands: `
		ip FAMILY route add default via GATEWAY dev DEVICE table 51820
		ip FAMILY rule add not fwmark 0xca6c lookup 51820
		ip FAMILY rule add lookup main suppress_prefixlength 0`},
	{name: "interface group", commands: `
		ip link set dev eth0 group 9
		ip FAMILY route add default via GATEWAY dev DEVICE table 100
		ip FAMILY rule add lookup 100
		ip FAMILY rule add lookup main suppress_ifgroup 9`},
}

// usePolicy gives the node rules by which pods use another gateway on a device.
func (n *network) usePolicy(t *testing.T, f testenv.Family, p policyRules, gateway netip.Addr, device string) {
	t.Helper()
	family, ip := "-4", "ip"
	if !f.Is4() {
		family, ip = "-6", "ip6"
	}
	fill := strings.NewReplacer("FAMILY", family, "IP", ip, "PODS", f.PodSubnet.Masked().String(), "GATEWAY", gateway.String(), "DEVICE", device)
	for line := range strings.Lines(fill.Replace(p.commands)) {
		n.runOnNode(t, strings.Fields(line)...)
	}
	if p.rules != "" {
		n.nft(t, fill.Replace(p.rules))
	}
}

// runOnNode runs a command on the node. No words are no command.
func (n *network) runOnNode(t *testing.T, words ...string) {
	t.Helper()
	if len(words) == 0 {
		return
	}
	if _, err := n.node().Run(testenv.Context(t), words[0], words[1:]...); err != nil {
		t.Fatal(err)
	}
}

// anycast is an address that each host outside has, so that the server identifies the uplink.
var anycast = map[string]netip.Addr{"IPv4": netip.MustParseAddr("203.0.113.99"), "IPv6": netip.MustParseAddr("2001:db8:99::1")}

func addAnycast(t *testing.T, ns *testenv.Namespace) {
	t.Helper()
	for _, addr := range anycast {
		addLoopback(t, ns, addr)
	}
}

// forEachFastPath runs a subtest for each value of fastPath, beside other keys of the network.
func forEachFastPath(t *testing.T, keys string, test func(t *testing.T, conflist string)) {
	for _, value := range []string{"never", "established", "always"} {
		t.Run(value, func(t *testing.T) { test(t, withKeys(keys+`, "fastPath": "`+value+`"`)) })
	}
}

func TestPolicyRouting(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		for _, policy := range policies {
			t.Run(policy.name, func(t *testing.T) {
				n := newNetworkWith(t, conflist)
				n.AddSecondUplink(t)
				for _, ns := range []*testenv.Namespace{n.Outside, n.SecondOutside} {
					addAnycast(t, ns)
				}
				for _, f := range testenv.Families {
					ping(t, n.node(), f.Outside) // resolves the next hop that pods must not use
					n.usePolicy(t, f, policy, f.SecondOutside, testenv.SecondUplinkName)
				}
				pod := n.AddPod(t, "a", nil)
				forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
					for _, ns := range []*testenv.Namespace{n.Outside, n.SecondOutside} {
						serve(t, ns, protocol, at(anycast[f.Name], 7000))
					}
					n.wantAlwaysBy(t, pod, protocol, at(anycast[f.Name], 7000), n.SecondOutside, f.SecondNode)
				})
			})
		}
	})
}

// wantAlwaysBy opens connections, and wants each request on them to reach the same server from the same address.
func (n *network) wantAlwaysBy(t *testing.T, pod *testenv.Pod, protocol string, to netip.AddrPort, server *testenv.Namespace, source netip.Addr) {
	t.Helper()
	for range 2 {
		client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, to)
		defer client.Close()
		for i := range 50 {
			if seen := ask(t, client, server); seen.Addr() != source {
				t.Fatalf("request %d: server sees %s, want %s", i, seen, source)
			}
		}
	}
}

// Both gateways are on one link, so the uplink is the same, but not the next hop.
func TestPolicyRoutingByAnotherGateway(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		for _, policy := range policies[:2] { // by a source and by a port: the routes are alike
			t.Run(policy.name, func(t *testing.T) {
				bridge := testenv.UplinkKinds[0]
				testenv.Require(t, bridge.Feature)
				n := newNetworkWith(t, conflist)
				device := n.MoveUplink(t, bridge)
				n.disableBridgeNetfilter(t)
				gateway := testenv.New(t, "gateway")
				n.runOnNode(t, "ip", "link", "add", "v8", "type", "veth", "peer", "name", "eth0", "netns", gateway.Path)
				n.runOnNode(t, "ip", "link", "set", "v8", "master", device, "up")
				for _, f := range testenv.Families {
					args := []string{"nsenter", "--net=" + gateway.Path, "ip", "address", "add", netip.PrefixFrom(sibling(f.Node, 77), f.PrefixLen).String(), "dev", "eth0"}
					if !f.Is4() {
						args = append(args, "nodad")
					}
					n.runOnNode(t, args...)
				}
				n.runOnNode(t, "nsenter", "--net="+gateway.Path, "ip", "link", "set", "eth0", "up")
				for _, ns := range []*testenv.Namespace{n.Outside, gateway} {
					addAnycast(t, ns)
				}
				for _, f := range testenv.Families {
					ping(t, n.node(), f.Outside) // resolves the next hop that pods must not use
					n.usePolicy(t, f, policy, sibling(f.Node, 77), device)
				}
				pod := n.AddPod(t, "a", nil)
				forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
					for _, ns := range []*testenv.Namespace{n.Outside, gateway} {
						serve(t, ns, protocol, at(anycast[f.Name], 7000))
					}
					n.wantAlwaysBy(t, pod, protocol, at(anycast[f.Name], 7000), gateway, f.Node)
				})
			})
		}
	})
}
