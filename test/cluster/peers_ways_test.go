package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestDoctorPeersOverIPv6 is TestDoctorPeers where the cure is another one over IPv6.
func TestDoctorPeersOverIPv6(t *testing.T) {
	const (
		allWell = "peers good: node-2 (2001:db8:1::2) answers by the tunnel\npeers good: node-3 (2001:db8:2::3) answers by the tunnel"
		accept  = "ip6tables -I INPUT -p udp --dport 4789 -j ACCEPT"
	)
	c := newCluster(t, "--prefer-ipv6")
	first, third := c.nodes[0], c.nodes[2]
	first.wantPeers("all is well", allWell)

	c.run(third.Namespace, "ip6tables -A INPUT -p udp --dport 4789 -j DROP")
	remedy := first.wantPeers("a firewall",
		"peers good: node-2\npeers wrong: node-3 (2001:db8:2::3) answers, but not by the tunnel: a firewall drops UDP port 4789")
	if !strings.Contains(remedy, accept) {
		t.Errorf("a firewall: got remedy %q, want %q", remedy, accept)
	}
	c.run(third.Namespace, accept)
	first.wantPeers("a firewall that accepts", allWell)

	c.brokenCard(first, "link0", insideOfTunnel)
	first.cureOffload(allWell, "2001:db8:1::2", "2001:db8:1::2")
	c.wantReach("a broken card, without its offload", first, third)

	c.nft("add table inet silent", "add chain inet silent output { type filter hook output priority 0; }",
		"add rule inet silent output icmpv6 type packet-too-big drop")
	c.ip(c.router, "link", "set", "link1", "mtu", "1400")
	remedy = first.wantPeers("a small link",
		"peers good: node-2\npeers wrong: a link to node-3 (2001:db8:2::3) takes packets of 1400 bytes, and containers' have up to 1500; it says nothing of it, so connections hang")
	if !strings.HasPrefix(remedy, "--mtu 1400 for ebpfnet-node on all nodes") {
		t.Errorf("a small link: got remedy %q, want the MTU", remedy)
	}
	c.restartAgents("--mtu", "1400")
	first.wantPeers("a small link, with its MTU", allWell)
}

// TestDoctorPeersDirect is TestDoctorPeers without a tunnel, where packets between containers are the link's own.
func TestDoctorPeersDirect(t *testing.T) {
	const allWell = "peers good: node-2 (192.0.2.2) answers directly"

	c := newIdleCluster(t, "--mode", "direct")
	for _, n := range c.nodes { // as routers learn it in such a network
		c.ip(c.router, "route", "add", podCIDR4(n.number).String(), "via", n.addrs[0].String())
		c.ip(c.router, "route", "add", podCIDR6(n.number).String(), "via", n.addrs[1].String())
	}
	c.startNodes()
	first, second := c.nodes[0], c.nodes[1]
	first.wantPeers("all is well", allWell)

	c.brokenCard(first, "link0", anywhere)
	first.cureOffload(allWell, "192.0.2.2", "2001:db8:1::2")
	c.wantReach("a broken card, without its offload", first, second)

	c.nft("add table bridge small", "add chain bridge small forward { type filter hook forward priority 0; }",
		"add rule bridge small forward meta length > 1400 drop") // as a switch does, which says nothing
	const cure = "ip link set eth0 mtu 1400"
	remedy := first.wantPeers("a small link",
		"peers wrong: a link to node-2 (192.0.2.2) takes packets of 1400 bytes, and containers' have up to 1500; it says nothing of it, so connections hang\n"+
			"peers wrong: a link to node-2 (2001:db8:1::2) takes packets of 1400 bytes, and containers' have up to 1500; it says nothing of it, so connections hang")
	if !strings.HasPrefix(remedy, cure+", on all nodes of the link") {
		t.Errorf("a small link: got remedy %q, want %q", remedy, cure)
	}
	for _, n := range []*node{first, second} {
		c.run(n.Namespace, cure)
		n.awaitMTU(1400)
	}
	first.wantPeers("a small link, with its MTU", allWell)
}

// cureOffload has doctor find a card that spoils checksums, and does what it says. The second node's prefixes are
// reached by these addresses.
func (n *node) cureOffload(allWell, by4, by6 string) {
	n.t.Helper()
	const cure = "ethtool -K eth0 tx off"

	remedy := n.wantPeers("a broken card", fmt.Sprintf(
		"peers wrong: packets to node-2 (%s) in 10.100.2.0/24 arrive with checksums that the kernel computes, but not with those that are left to eth0\n"+
			"peers wrong: packets to node-2 (%s) in fd44:2::/64\npeers wrong: packets to node-3", by4, by6))
	if !strings.HasPrefix(remedy, cure) {
		n.t.Errorf("a broken card: got remedy %q, want %q", remedy, cure)
	}
	if _, err := n.Run(testenv.Context(n.t), "sh", "-c", cure); err != nil {
		n.t.Fatal(err)
	}
	n.wantPeers("a broken card, without its offload", allWell)
}

// awaitMTU waits until the agent has told the datapath the MTU of all ways to other nodes.
func (n *node) awaitMTU(want int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("MTU %d of %s", want, n.Name), func() error {
		return n.Do(func() error {
			datapath, err := loader.OpenLoaded()
			if err != nil {
				return err
			}
			defer datapath.Close()
			nodes, err := maps.Nodes(datapath)
			if err == nil && len(nodes) == 0 {
				return errors.New("got no ways")
			}
			if other := slices.IndexFunc(nodes, func(to maps.Node) bool { return to.MTU != want }); other >= 0 {
				return fmt.Errorf("got %+v", nodes[other])
			}
			return err
		})
	})
}
