package scenario

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// What else runs on a host: firewalls, settings of distributions, other container engines. Pods must work
// beside each, and it beside pods.

// wantConnectivity sends traffic on all usual paths. Host port 8080 is forwarded to web.
func (n *network) wantConnectivity(t *testing.T, a, web *testenv.Pod) {
	t.Helper()
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, a.Namespace, f.Outside)
		outside := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachAsNode(t, a.Namespace, protocol, outside, n.Outside, f.Node)
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachUntranslated(t, a.Namespace, protocol, at(f.Pod(web), 80), web.Namespace)
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		for _, addr := range append([]netip.Addr{f.Node}, f.Loopbacks...) {
			reach(t, n.node(), protocol, at(addr, 8080), web.Namespace)
		}
		for _, pod := range []*testenv.Pod{a, web} {
			reach(t, pod.Namespace, protocol, at(f.Node, 8080), web.Namespace)
		}
	})
}

// nft loads rules on the node.
func (n *network) nft(t *testing.T, rules string) {
	t.Helper()
	nft(t, n.node(), rules)
}

// nft runs nft's commands in the namespace.
func nft(t *testing.T, in *testenv.Namespace, commands string) (out string) {
	t.Helper()
	requireTool(t, "nft", "nftables")
	commands = strings.NewReplacer("}", "\n}\n").Replace(commands) // nft wants a newline after each block
	out, err := in.Run(testenv.Context(t), "nft", commands)
	testenv.Must(t, err)
	return out
}

// Common netfilter rules let pods' traffic pass.
func TestFirewalls(t *testing.T) {
	for name, rules := range map[string]string{
		// As with docker, whose FORWARD policy is drop: the administrator must accept pods, whatever
		// the plugin.
		"drops by default": `
			table inet filter { chain forward { type filter hook forward priority 0; policy drop;
				ct state established,related accept
				ip saddr 10.88.0.0/24 accept; ip daddr 10.88.0.0/24 accept
				ip6 saddr fd00:88::/64 accept; ip6 daddr fd00:88::/64 accept
			} }`,
		"drops invalid packets, like kube-proxy": `
			table inet filter { chain forward { type filter hook forward priority 0; policy accept;
				ct state invalid drop
			} }`,
		"masquerades everything on the uplink": `
			table inet other { chain post { type nat hook postrouting priority 100; policy accept;
				oifname "eth0" masquerade
			} }`,
		"masquerades pods, like the bridge plugin": `
			table inet other { chain post { type nat hook postrouting priority 100; policy accept;
				ip saddr 10.88.0.0/24 ip daddr != 10.88.0.0/24 masquerade
				ip6 saddr fd00:88::/64 ip6 daddr != fd00:88::/64 masquerade
			} }`,
		"checks the reverse path": `
			table inet other { chain pre { type filter hook prerouting priority -300; policy accept;
				fib saddr . iif oif missing drop
			} }`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t)
			n.nft(t, rules)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			n.wantConnectivity(t, a, web)
		})
	}
}

// Sysctls that distributions set, before and after ADD.
func TestSysctls(t *testing.T) {
	n := newNetwork(t)
	set := func() {
		for name, value := range map[string]string{
			"net/ipv4/conf/all/rp_filter":        "1", // systemd
			"net/ipv4/conf/default/rp_filter":    "1",
			"net/ipv4/conf/all/accept_local":     "0",
			"net/ipv4/conf/all/log_martians":     "1",
			"net/ipv4/conf/all/send_redirects":   "1",
			"net/ipv4/conf/all/arp_ignore":       "1", // LVS
			"net/ipv4/conf/all/arp_announce":     "2",
			"net/ipv6/conf/all/accept_ra":        "0",
			"net/ipv4/conf/default/forwarding":   "0",
			"net/ipv4/ip_nonlocal_bind":          "1",
			"net/ipv4/conf/all/accept_redirects": "0",
		} {
			testenv.Must(t, n.node().SetSysctl(name, value))
		}
	}
	set()
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	set()
	n.wantConnectivity(t, a, web)
}

// Another engine's bridge, with a container behind it and rules like libvirt's, which reject all other traffic.
// TestBridgeNetfilterBesideAnotherEngine has docker's.
func TestOtherBridges(t *testing.T) {
	n := newNetwork(t)
	container := n.otherEngine(t)
	n.nft(t, `table ip libvirt { chain forward { type filter hook forward priority 0; policy accept;
			oifname "br9" ip daddr 172.17.0.0/16 ct state established,related accept
			iifname "br9" ip saddr 172.17.0.0/16 accept
			iifname "br9" oifname "br9" accept
			oifname "br9" reject; iifname "br9" reject
		} chain post { type nat hook postrouting priority 100; policy accept; ip saddr 172.17.0.0/16 ip daddr != 172.17.0.0/16 masquerade; } }`)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.wantConnectivity(t, a, web)

	f := testenv.IPv4
	reachAsNode(t, container, "tcp", serve(t, n.Outside, "tcp", at(f.Outside, 0)), n.Outside, f.Node)
	n.disableBridgeNetfilter(t)
	serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
	reach(t, container, "tcp", at(f.Node, 8080), web.Namespace)
}

// otherEngine makes a bridge with a container behind it, which has its default route there.
func (n *network) otherEngine(t *testing.T) *testenv.Namespace {
	t.Helper()
	container := testenv.New(t, "other-engine")
	for _, command := range [][]string{
		{"ip", "link", "add", "br9", "type", "bridge"},
		{"ip", "address", "add", "172.17.0.1/16", "dev", "br9"},
		{"ip", "link", "set", "br9", "up"},
		{"ip", "link", "add", "v9", "type", "veth", "peer", "name", "eth0", "netns", container.Path},
		{"ip", "link", "set", "v9", "master", "br9", "up"},
		{"nsenter", "--net=" + container.Path, "ip", "address", "add", "172.17.0.2/16", "dev", "eth0"},
		{"nsenter", "--net=" + container.Path, "ip", "link", "set", "eth0", "up"},
		{"nsenter", "--net=" + container.Path, "ip", "route", "add", "default", "via", "172.17.0.1"},
	} {
		if _, err := n.node().Run(testenv.Context(t), command[0], command[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	return container
}

// disableBridgeNetfilter hides bridged packets from conntrack until the bridge's own device receives
// them. Otherwise conntrack expects a host port's replies from the address that the client behind the
// bridge used, and the engine's masquerading loses them.
func (n *network) disableBridgeNetfilter(t *testing.T) {
	t.Helper()
	for _, name := range testenv.BridgeNetfilterSysctls {
		if _, err := n.node().Sysctl(name); err != nil {
			return // no br_netfilter
		}
		testenv.Must(t, n.node().SetSysctl(name, "0"))
	}
}

// Two nodes share their file systems, as nested containers do. They use the same networks, names and
// ports, and do not affect each other.
func TestTwoNodesOnOneHost(t *testing.T) {
	n, other := newNetwork(t), newNetworkWith(t, withKeys(`"ipMasq": true, "mtu": 1400`))
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	b, otherWeb := other.AddPod(t, "b", nil), other.AddPod(t, "web2", mapBoth(8080, 80))
	n.wantConnectivity(t, a, web)
	other.wantConnectivity(t, b, otherWeb)
	testenv.NoError(t, other.GC(testenv.Context(t), attachmentOf(b), attachmentOf(otherWeb), attachmentOf(a), attachmentOf(web)))
	n.wantConnectivity(t, a, web)
	del(t, otherWeb)
	del(t, b)
	wantCheck(t, a, web)
	n.wantConnectivity(t, a, web)
}

// ebpfnet creates no bridge and no netfilter rule.
func TestNoBridgeNoRules(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "web", mapBoth(8080, 80))
	pod := n.AddPod(t, "a", nil)
	ping(t, pod.Namespace, testenv.OutsideAddr4)

	for _, ns := range []*testenv.Namespace{n.node(), pod.Namespace} {
		links, err := rtnl.Links(ns.Netlink())
		testenv.Must(t, err)
		for _, link := range links {
			if kind := link.Type(); kind != "veth" && kind != "device" { // the type of lo
				t.Errorf("%s in %s: got a %s, want a veth", link.Attrs().Name, ns.Name, kind)
			}
		}
		wantNoRules(t, ns)
	}
}

func wantNoRules(t *testing.T, ns *testenv.Namespace) {
	t.Helper()
	for _, lister := range []struct {
		debianPackage string
		command       []string
	}{
		{"nftables", []string{"nft", "list", "ruleset"}},
		{"iptables", []string{"iptables-save"}},
		{"iptables", []string{"ip6tables-save"}},
	} {
		requireTool(t, lister.command[0], lister.debianPackage)
		output, err := ns.Run(testenv.Context(t), lister.command[0], lister.command[1:]...)
		testenv.Must(t, err)
		if strings.TrimSpace(output) != "" {
			t.Errorf("%s in %s: want nothing, got:\n%s", strings.Join(lister.command, " "), ns.Name, output)
		}
	}
}

// requireTool fails the test if a command is missing. A skip would hide that nothing was checked.
func requireTool(t *testing.T, command, debianPackage string) {
	t.Helper()
	if _, err := exec.LookPath(command); err != nil {
		t.Fatalf("%s is missing: apt-get install %s", command, debianPackage)
	}
}
