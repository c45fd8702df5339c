package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestAuto goes directly where the network lets containers' addresses pass, and by the tunnel elsewhere and otherwise.
func TestAuto(t *testing.T) {
	c := newCluster(t, append(clusterCIDRs, "--mode", "auto")...)
	first, second := c.nodes[0], c.nodes[1]
	first.awaitRoute("on one link", 2, "via 192.0.2.2 dev eth0")
	second.awaitRoute("on one link", 1, "via 192.0.2.1 dev eth0")
	first.awaitRoute("behind a router", 3, "encap ip id 1 src 192.0.2.1 dst 198.51.100.3 ")
	first.wantMetrics(`ebpfnet_peer_prefixes{mode="direct"} 2`, `ebpfnet_peer_prefixes{mode="tunnel"} 2`)
	c.wantTraffic("direct")
	first.wantUnreachable("without a container, and without a node", 1, 4)
	c.wantUnmoved(first, second)

	lost := first.directLost()
	// As a switch does that knows no such addresses. On 5.10 a bridge's own rules see no packet.
	c.nft("add table netdev switch")
	for _, n := range []*node{first, second} {
		chain := fmt.Sprintf("netdev switch of-%d", n.number)
		c.nft(fmt.Sprintf("add chain %s { type filter hook ingress device %s priority 0; }", chain, n.Name),
			"add rule "+chain+" ip saddr 10.100.0.0/16 drop", "add rule "+chain+" ip6 saddr fd44::/16 drop")
	}
	first.awaitRoute("the network drops containers' addresses", 2, "encap ip id 1 src 192.0.2.1 dst 192.0.2.2 ")
	second.awaitRoute("the network drops containers' addresses", 1, "encap ip id 1 src 192.0.2.2 dst 192.0.2.1 ")
	c.wantTraffic("not direct any more")
	first.wantMetrics(`ebpfnet_peer_prefixes{mode="skipped"} 2`)
	if lost := first.directLost() - lost; lost < 2 { // of two families
		t.Errorf("direct nodes lost: got %d, want 2 or more", lost)
	}
	found, _ := first.doctor("probes lost")
	if !slices.ContainsFunc(found, func(f finding) bool {
		return f.State == "warning" && strings.Contains(f.What, "direct probes are lost since ")
	}) {
		c.Errorf("got findings %v, want that direct probes are lost", found)
	}
}

// wantUnmoved has a host on the nodes' link send probes and replies to them, each in the other's name. Their routes stay
// direct, and strict reverse path filters drop nothing.
func (c *cluster) wantUnmoved(first, second *node) {
	c.Helper()
	for _, n := range []*node{first, second} {
		for _, device := range []string{"all", "eth0"} {
			testenv.Must(c, n.SetSysctl("net/ipv4/conf/"+device+"/rp_filter", "1"))
		}
		_, err := n.Run(testenv.Context(c), "nft", fmt.Sprintf( // the questions of the node's agent
			"table inet probes { chain out { type filter hook output priority 0; udp dport %d @th,192,8 1 counter; }; }", probePort))
		testenv.Must(c, err)
	}
	c.ip(c.router, "link", "add", "stranger", "master", "link0", "up", "type", "veth", "peer", "name", "wire")
	c.ip(c.router, "link", "set", "wire", "up")
	var flows testenv.Askers
	for _, f := range testenv.Families {
		flows = append(flows, c.startFlow(f, first, second), c.startFlow(f, second, first))
	}
	testenv.NoError(c, flows.Lossless(c, func(int) error {
		const direct = `ebpfnet_peer_prefixes{mode="direct"} 2` // again, if an earlier attempt has lost probes
		lost, want := map[*node]int{}, map[*node]int{}
		for _, n := range []*node{first, second} {
			n.wantMetrics(direct)
			lost[n], want[n] = n.directLost(), n.probes()+3*len(testenv.Families) // rounds
		}
		for i := 0; i < 20 || first.probes() < want[first] || second.probes() < want[second]; i++ {
			c.forgeProbes(i, first, second)
			<-time.After(50 * time.Millisecond) // not a wait: the rate
		}
		for _, n := range []*node{first, second} {
			if lost := n.directLost() - lost[n]; lost > 0 {
				return fmt.Errorf("%s has lost %d direct nodes", n.Name, lost)
			}
			n.wantMetrics(direct)
		}
		return nil
	}))
	flows.Stop()
	c.ip(c.router, "link", "del", "stranger")
}

const probePort = 9910

// forgeProbes sends a question or a reply to each node in the other's name.
func (c *cluster) forgeProbes(i int, first, second *node) {
	c.Helper()
	for _, cidr := range []func(int) netip.Prefix{podCIDR4, podCIDR6} {
		for from, to := range map[*node]*node{first: second, second: first} {
			p := testenv.UDPPacket(netip.AddrPortFrom(cidr(from.number).Addr(), probePort), netip.AddrPortFrom(cidr(to.number).Addr(), probePort), "")
			p.SrcMAC, p.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 0x66}, to.MACOf(c, "eth0")
			p.Payload = "ebpfnet probe 2 " + string([]byte{byte(i % 2), byte(i / 2 % 2), 0, 0, 0}) + strings.Repeat("n", 16)
			testenv.Must(c, c.router.SendFrames("wire", p.MustBuild()))
		}
	}
}
