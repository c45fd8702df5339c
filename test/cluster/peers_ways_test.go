package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// TestDoctorPeersOverIPv6 has a tunnel over IPv6, where nothing is divided.
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
	if !strings.Contains(remedy, opens) {
		t.Errorf("a firewall: got remedy %q, want %q in it", remedy, opens)
	}
	c.run(third.Namespace, accept)
	first.wantPeers("a firewall that accepts", allWell)

	c.nft("add table inet silent", "add chain inet silent output { type filter hook output priority 0; }",
		"add rule inet silent output icmpv6 type packet-too-big drop")
	c.ip(c.router, "link", "set", "link1", "mtu", "1400")
	first.wantPeers("a small link",
		"peers good: node-2\npeers wrong: node-3 (2001:db8:2::3) answers short packets, but none of 1500 bytes: connections hang")
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
	first.wantUnreachable("without a container", 1)

	c.nft("add table bridge small", "add chain bridge small forward { type filter hook forward priority 0; }",
		"add rule bridge small forward meta length > 1400 drop") // as a switch does, which says nothing
	first.wantPeers("a small link",
		"peers wrong: node-2 (192.0.2.2) answers short packets, but none of 1500 bytes: connections hang\n"+
			"peers wrong: node-2 (2001:db8:1::2) answers short packets, but none of 1500 bytes: connections hang")
	for _, n := range []*node{first, second} {
		c.run(n.Namespace, "ip link set eth0 mtu 1400")
		n.awaitMTU(1400)
	}
	first.wantPeers("a small link, with its MTU", allWell)
}

// awaitMTU waits until the agent has given the datapath the MTU of all ways to other nodes.
func (n *node) awaitMTU(want int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("MTU %d of %s", want, n.Name), func() error {
		return n.WithDatapath(func(datapath *loader.Datapath) error {
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
