package desired

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

var (
	addr   = netip.MustParseAddr
	prefix = netip.MustParsePrefix
	config = Config{Mode: ModeTunnel, Device: "ebpfnet0", Port: 4789, VNI: 7}
)

// node returns a node that was created as the n-th. Each word is a podCIDR or an address.
func node(n int, words ...string) Node {
	made := Node{Name: fmt.Sprintf("node-%d", n), Created: time.Unix(int64(n), 0)}
	for _, word := range words {
		if strings.Contains(word, "/") {
			made.PodCIDRs = append(made.PodCIDRs, word)
		} else {
			made.Addresses = append(made.Addresses, word)
		}
	}
	return made
}

// hostWith returns a host with one device.
func hostWith(addresses ...string) Host {
	link := Link{Index: 2, MTU: 1500}
	for _, address := range addresses {
		link.Addresses = append(link.Addresses, prefix(address))
	}
	return Host{Links: []Link{link}}
}

var dualHost = hostWith("192.0.2.1/24", "2001:db8::1/64")

// TestRoutes returns the routes and entries for one other node in each kind of cluster.
func TestRoutes(t *testing.T) {
	with := func(change func(*Config)) Config {
		changed := config
		change(&changed)
		return changed
	}
	direct := with(func(c *Config) { c.Mode = ModeDirect })
	auto := with(func(c *Config) { c.Mode = ModeAuto })
	loHost := Host{Links: append([]Link{{Index: 1, Addresses: []netip.Prefix{prefix("198.18.0.1/24")}}}, dualHost.Links...)}
	over4 := rtnl.Tunnel{ID: 7, Local: addr("192.0.2.1"), Remote: addr("192.0.2.2")}
	over6 := rtnl.Tunnel{ID: 7, Local: addr("2001:db8::1"), Remote: addr("2001:db8::2"), Checksum: true}
	for _, test := range []struct {
		name   string
		config Config
		host   Host
		proved string
		nodes  []Node
		routes []rtnl.NodeRoute
		peers  []maps.Node
		podMTU int
	}{
		{"IPv4", config, dualHost, "", []Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "192.0.2.2")},
			[]rtnl.NodeRoute{{Prefix: prefix("10.244.2.0/24"), Source: addr("10.244.1.1"), Tunnel: over4}},
			[]maps.Node{{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeTunnel, MTU: 1450}}, 1450},
		{"dual stack over IPv4", config, dualHost, "",
			[]Node{node(1, "10.244.1.0/24", "fd44:1::/64", "192.0.2.1", "2001:db8::1"), node(2, "10.244.2.0/24", "fd44:2::/64", "192.0.2.2", "2001:db8::2")},
			[]rtnl.NodeRoute{
				{Prefix: prefix("10.244.2.0/24"), Source: addr("10.244.1.1"), Tunnel: over4},
				{Prefix: prefix("fd44:2::/64"), Metric: 1024, Source: addr("fd44:1::1"), Tunnel: over4},
			},
			[]maps.Node{
				{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeTunnel, MTU: 1450},
				{Prefix: prefix("fd44:2::/64"), Remote: addr("192.0.2.2"), Mode: maps.NodeTunnel, MTU: 1450},
			}, 1450},
		{"dual stack over IPv6", with(func(c *Config) { c.PreferIPv6 = true }), dualHost, "",
			[]Node{node(1, "10.244.1.0/24", "192.0.2.1", "2001:db8::1"), node(2, "10.244.2.0/24", "192.0.2.2", "2001:db8::2")},
			[]rtnl.NodeRoute{{Prefix: prefix("10.244.2.0/24"), Source: addr("10.244.1.1"), Tunnel: over6, MTU: 1430}},
			[]maps.Node{{Prefix: prefix("10.244.2.0/24"), Remote: addr("2001:db8::2"), Mode: maps.NodeTunnel, MTU: 1430}}, 1430},
		{"IPv6 only", config, hostWith("2001:db8::1/64"), "", []Node{node(1, "fd44:1::/64", "2001:db8::1"), node(2, "fd44:2::/64", "2001:db8::2")},
			[]rtnl.NodeRoute{{Prefix: prefix("fd44:2::/64"), Metric: 1024, Source: addr("fd44:1::1"), Tunnel: over6}},
			[]maps.Node{{Prefix: prefix("fd44:2::/64"), Remote: addr("2001:db8::2"), Mode: maps.NodeTunnel, MTU: 1430}}, 1430},
		{"an IPv6-only node among others", config, dualHost, "",
			[]Node{node(1, "fd44:1::/64", "192.0.2.1", "2001:db8::1"), node(2, "fd44:2::/64", "2001:db8::2")},
			[]rtnl.NodeRoute{{Prefix: prefix("fd44:2::/64"), Metric: 1024, Source: addr("fd44:1::1"), Tunnel: over6, MTU: 1430}},
			[]maps.Node{{Prefix: prefix("fd44:2::/64"), Remote: addr("2001:db8::2"), Mode: maps.NodeTunnel, MTU: 1430}}, 1450},
		{"address elsewhere", config, hostWith("198.51.100.1/24"), "", []Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "192.0.2.2")},
			[]rtnl.NodeRoute{{Prefix: prefix("10.244.2.0/24"), Source: addr("10.244.1.1"), Tunnel: rtnl.Tunnel{ID: 7, Remote: addr("192.0.2.2")}}},
			[]maps.Node{{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeTunnel, MTU: 1450}}, 1450},
		{"MTU by configuration", with(func(c *Config) { c.MTU = 9000 }), dualHost, "", []Node{node(1, "10.244.1.0/24", "192.0.2.1")}, nil, nil, 8950},
		{"direct, one link", direct, dualHost, "",
			[]Node{node(1, "10.244.1.0/24", "fd44:1::/64", "192.0.2.1", "2001:db8::1"), node(2, "10.244.2.0/24", "fd44:2::/64", "192.0.2.2", "2001:db8::2")},
			[]rtnl.NodeRoute{
				{Prefix: prefix("10.244.2.0/24"), Device: 2, Gateway: addr("192.0.2.2")},
				{Prefix: prefix("fd44:2::/64"), Metric: 1024, Device: 2, Gateway: addr("2001:db8::2")},
			},
			[]maps.Node{
				{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeDirect, MTU: 1500},
				{Prefix: prefix("fd44:2::/64"), Remote: addr("2001:db8::2"), Mode: maps.NodeDirect, MTU: 1500},
			}, 0},
		{"direct, behind a router", direct, dualHost, "", []Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(3, "10.244.3.0/24", "198.18.0.3")},
			nil, []maps.Node{{Prefix: prefix("10.244.3.0/24"), Remote: addr("198.18.0.3"), Mode: maps.NodeDirect, MTU: 1500}}, 0},
		{"direct, on lo", direct, loHost, "",
			[]Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(3, "10.244.3.0/24", "198.18.0.3"), node(4, "10.244.4.0/24", "198.18.0.1")},
			nil, []maps.Node{
				{Prefix: prefix("10.244.3.0/24"), Remote: addr("198.18.0.3"), Mode: maps.NodeDirect, MTU: 1500},
				{Prefix: prefix("10.244.4.0/24"), Remote: addr("198.18.0.1"), Mode: maps.NodeDirect, MTU: 1500},
			}, 0},
		{"auto, proved on one link", auto, dualHost, "192.0.2.2",
			[]Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "192.0.2.2"), node(3, "10.244.3.0/24", "198.18.0.3")},
			[]rtnl.NodeRoute{
				{Prefix: prefix("10.244.2.0/24"), Device: 2, Gateway: addr("192.0.2.2")},
				{Prefix: prefix("10.244.2.0/32"), Device: 2, Gateway: addr("192.0.2.2"), Source: addr("10.244.1.0")},
				{Prefix: prefix("10.244.3.0/24"), Source: addr("10.244.1.1"),
					Tunnel: rtnl.Tunnel{ID: 7, Local: addr("192.0.2.1"), Remote: addr("198.18.0.3")}},
			},
			[]maps.Node{
				{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeDirect, MTU: 1500},
				{Prefix: prefix("10.244.3.0/24"), Remote: addr("198.18.0.3"), Mode: maps.NodeTunnel, MTU: 1450},
			}, 1450},
		{"auto, not proved", auto, dualHost, "", []Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "192.0.2.2")},
			[]rtnl.NodeRoute{
				{Prefix: prefix("10.244.2.0/24"), Source: addr("10.244.1.1"), Tunnel: over4},
				{Prefix: prefix("10.244.2.0/32"), Device: 2, Gateway: addr("192.0.2.2"), Source: addr("10.244.1.0")},
			},
			[]maps.Node{{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeEither, MTU: 1450}}, 1450},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.proved != "" {
				test.host.Proved = map[netip.Addr]bool{addr(test.proved): true}
			}
			got, err := Of(test.nodes, "node-1", test.config, test.host)
			if err != nil {
				t.Fatal(err)
			}
			check(t, "routes", got.Routes, test.routes)
			check(t, "peers", got.Nodes, test.peers)
			check(t, "MTU of containers", got.PodMTU, test.podMTU)
		})
	}
}

// TestDevice has the gateways of both families, and an MTU for the widest tunnel.
func TestDevice(t *testing.T) {
	got, err := Of([]Node{node(1, "10.244.1.0/24", "fd44:1::/64", "192.0.2.1", "2001:db8::1")}, "node-1", config, dualHost)
	if err != nil {
		t.Fatal(err)
	}
	check(t, "device", got.Device, &Device{
		Name: "ebpfnet0", MAC: macOf("node-1"), MTU: 1450,
		Addresses: []netip.Prefix{prefix("10.244.1.1/32"), prefix("fd44:1::1/128")},
		Tunnel: maps.Tunnel{
			VNI: 7, Port: 4789, Addr4: addr("192.0.2.1"), Addr6: addr("2001:db8::1"),
			Containers4: prefix("10.244.1.0/24"), Containers6: prefix("fd44:1::/64"),
		},
	})
	const multicast, local = 1, 2
	mac, err := net.ParseMAC(macOf("node-1"))
	if err != nil || mac[0]&(multicast|local) != local || macOf("node-1") == macOf("node-2") {
		t.Errorf("got MAC addresses %s and %s (%v), want different ones, unicast and locally administered", mac, macOf("node-2"), err)
	}
}

// TestContainers names those that the tunnel is for, unless a family has more than one prefix. Of a family without one it
// is for nobody.
func TestContainers(t *testing.T) {
	got, err := Of([]Node{node(1, "10.244.1.0/24", "10.245.1.0/24", "10.246.1.0/24", "fd44:1::/64", "192.0.2.1")}, "node-1", config, hostWith("198.51.100.1/24"))
	if err != nil {
		t.Fatal(err)
	}
	check(t, "tunnel", got.Device.Tunnel, maps.Tunnel{VNI: 7, Port: 4789, Containers6: prefix("fd44:1::/64")})
	for cidr, want := range map[string][2]netip.Prefix{
		"10.244.1.0/24": {prefix("10.244.1.0/24"), prefix("::/128")},
		"fd44:1::/64":   {prefix("0.0.0.0/32"), prefix("fd44:1::/64")},
	} {
		got, err := Of([]Node{node(1, cidr, "192.0.2.1")}, "node-1", config, hostWith("192.0.2.1/24"))
		if err != nil {
			t.Fatal(err)
		}
		check(t, "containers of one family", [2]netip.Prefix{got.Device.Tunnel.Containers4, got.Device.Tunnel.Containers6}, want)
	}
}

// TestLost says so of a node that was reached directly.
func TestLost(t *testing.T) {
	c, host := config, dualHost
	c.Mode = ModeAuto
	host.Lost = map[netip.Addr]time.Time{addr("192.0.2.2"): time.Unix(0, 0)}
	nodes := []Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "192.0.2.2"), node(3, "10.244.3.0/24", "192.0.2.3")}
	got, err := Of(nodes, "node-1", c, host)
	if err != nil || len(got.Skipped) != 1 || got.Skipped[0].Node != "node-2" || !strings.Contains(got.Skipped[0].Reason, "since 00:00:00 UTC") {
		t.Errorf("got skipped %v (%v), want node-2 alone, since when", got.Skipped, err)
	}
	if len(got.Nodes) != 2 {
		t.Errorf("got nodes %v, want both", got.Nodes)
	}
}

// TestProbes are of nodes on the same link alone, one for each of their addresses, from addresses that the device has.
func TestProbes(t *testing.T) {
	nodes := []Node{
		node(1, "10.244.1.0/24", "fd44:1::/64", "192.0.2.1", "2001:db8::1"), node(2, "10.244.2.0/24", "10.245.2.0/24", "fd44:2::/64", "192.0.2.2", "2001:db8::2"),
		node(3, "10.244.3.0/24", "198.18.0.3"), node(4, "10.244.4.0/24"),
	}
	of := func(mode Mode) (*State, error) {
		c := config
		c.Mode = mode
		return Of(nodes, "node-1", c, dualHost)
	}
	got, err := of(ModeAuto)
	if err != nil {
		t.Fatal(err)
	}
	check(t, "probes", got.Probes, []Probe{
		{Own: addr("10.244.1.0"), Peer: addr("10.244.2.0"), Remote: addr("192.0.2.2")},
		{Own: addr("fd44:1::"), Peer: addr("fd44:2::"), Remote: addr("2001:db8::2")},
	})
	for _, probe := range got.Probes {
		if !slices.Contains(got.Device.Addresses, netip.PrefixFrom(probe.Own, probe.Own.BitLen())) {
			t.Errorf("got addresses %v, want %s among them", got.Device.Addresses, probe.Own)
		}
	}
	for _, mode := range []Mode{ModeTunnel, ModeDirect} {
		if got, err := of(mode); err != nil || len(got.Probes) > 0 {
			t.Errorf("mode %s: got probes %v (%v), want none", mode, got.Probes, err)
		}
	}
}

// TestMTU is that of the device with this node's address, or of the narrowest one.
func TestMTU(t *testing.T) {
	link := func(mtu int, addresses ...string) Link {
		made := hostWith(addresses...).Links[0]
		made.MTU = mtu
		return made
	}
	for name, test := range map[string]struct {
		links []Link
		want  int
	}{
		"own address on one":  {[]Link{link(1400, "198.51.100.1/24"), link(9000, "192.0.2.1/24")}, 8950},
		"own address on lo":   {[]Link{link(0, "192.0.2.1/32"), link(9000, "198.51.100.1/24"), link(1400, "203.0.113.1/24")}, 1350},
		"own address on none": {[]Link{link(0, "198.18.0.1/32"), link(1500, "203.0.113.1/24")}, 1450},
	} {
		got, err := Of([]Node{node(1, "10.244.1.0/24", "192.0.2.1")}, "node-1", config, Host{Links: test.links})
		if err != nil {
			t.Fatal(err)
		}
		check(t, name, got.Device.MTU, test.want)
	}
}

// TestOddNodes skips what is wrong, with a reason, and serves the rest.
func TestOddNodes(t *testing.T) {
	own := node(2, "10.244.2.0/24", "192.0.2.2")
	good := node(3, "10.244.3.0/24", "192.0.2.3")
	limited := config
	limited.PodCIDRs = []netip.Prefix{prefix("10.244.0.0/16")}
	limited.Reserved = []netip.Addr{addr("10.244.9.9")}
	for _, test := range []struct {
		name    string
		config  Config
		odd     []Node
		served  []string // prefixes, beside that of the good node
		skipped string
		problem string
	}{
		{"no podCIDR", config, []Node{node(4, "192.0.2.4")}, nil, "no podCIDR", ""},
		{"no address", config, []Node{node(4, "10.244.4.0/24")}, nil, "no usable internal address", ""},
		{"no prefix", config, []Node{node(4, "10.244.4.0/240", "192.0.2.4")}, nil, "not a prefix", ""},
		{"control characters", config, []Node{node(4, "\x1b[2J/24", "192.0.2.4")}, nil, "not a prefix", ""},
		{"IPv4 in IPv6", config, []Node{node(4, "::ffff:10.244.4.0/120", "192.0.2.4")}, nil, "not a prefix", ""},
		{"host bits", config, []Node{node(4, "10.244.4.7/24", "192.0.2.4")}, []string{"10.244.4.0/24"}, "", ""},
		{"default route", config, []Node{node(4, "0.0.0.0/0", "192.0.2.4")}, nil, "larger than a /8", ""},
		{"IPv6 default route", config, []Node{node(4, "::/0", "192.0.2.4")}, nil, "larger than a /16", ""},
		{"loopback", config, []Node{node(4, "127.0.0.0/8", "192.0.2.4")}, nil, "no container can have", ""},
		{"too small", config, []Node{node(4, "10.244.4.0/31", "192.0.2.4")}, nil, "too small", ""},
		{"bad address", config, []Node{node(4, "10.244.4.0/24", "host.example", "127.0.0.1", "fe80::4%eth0")}, nil, "no usable internal address", ""},
		{"second address", config, []Node{node(4, "10.244.4.0/24", "127.0.0.1", "192.0.2.4")}, []string{"10.244.4.0/24"}, "", ""},
		{"other family's address", config, []Node{node(4, "10.244.4.0/24", "2001:db8::4")}, nil, "a family that this node has", ""},
		{"this node's address", config, []Node{node(4, "10.244.4.0/24", "192.0.2.2")}, nil, "192.0.2.2 is this node's", ""},
		{"the same, younger", config, []Node{node(4, "10.244.3.0/24", "192.0.2.4")}, nil, "overlaps 10.244.3.0/24 of node node-3", ""},
		{"overlap, younger and larger", config, []Node{node(4, "10.244.0.0/22", "192.0.2.4")}, nil, "overlaps", ""},
		{"overlap, younger and smaller", config, []Node{node(4, "10.244.3.128/25", "192.0.2.4")}, nil, "overlaps 10.244.3.0/24", ""},
		{"half of it is good", config, []Node{node(4, "10.244.3.0/24", "10.244.4.0/24", "192.0.2.4")}, []string{"10.244.4.0/24"}, "overlaps", ""},
		{"this node's, younger", config, []Node{node(4, "10.244.2.0/24", "192.0.2.4")}, nil, "overlaps 10.244.2.0/24 of node node-2, this one", ""},
		{"this node's, older", config, []Node{node(1, "10.244.2.0/25", "192.0.2.1")}, nil, "this one", "node node-1 is older and has 10.244.2.0/25"},
		{"address of an older node", config, []Node{node(1, "10.244.9.0/24", "198.18.0.9"), node(4, "198.18.0.0/24", "192.0.2.4")},
			[]string{"10.244.9.0/24"}, "has the address 198.18.0.9 of node node-1", ""},
		{"an address of this node's devices", config, []Node{node(1, "203.0.113.0/24", "198.18.0.4")}, nil, "this node's devices", ""},
		{"address of a younger node", config, []Node{node(1, "198.18.0.0/24", "192.0.2.1"), node(4, "10.244.4.0/24", "198.18.0.4")},
			[]string{"198.18.0.0/24"}, "198.18.0.4 is in 198.18.0.0/24 of node node-1", ""},
		{"an older node's address in this node's", config, []Node{node(1, "10.244.1.0/24", "10.244.2.7")}, nil,
			"10.244.2.7 is in 10.244.2.0/24 of node node-2, this one", "node node-1 is older and has the address 10.244.2.7 in this node's 10.244.2.0/24"},
		{"a younger node's address in this node's", config, []Node{node(4, "10.244.4.0/24", "10.244.2.7")}, nil, "10.244.2.7 is in 10.244.2.0/24", ""},
		{"the same, where containers are", limited, []Node{node(1, "10.244.1.0/24", "10.244.2.7")}, nil, "no usable internal address", ""},
		{"a broadcast address", config, []Node{node(1, "10.244.4.0/24", "192.0.2.255")}, nil, "192.0.2.255 is a broadcast address", ""},
		{"the last one of two", config, []Node{node(1, "10.244.4.0/24", "203.0.113.3")}, []string{"10.244.4.0/24"}, "", ""},
		{"its own address", config, []Node{node(4, "198.18.0.0/24", "198.18.0.4")}, nil, "has the address 198.18.0.4 of node node-4", ""},
		{"outside of the cluster's", limited, []Node{node(1, "192.168.0.0/24", "192.0.2.4")}, nil, "outside of the cluster's [10.244.0.0/16]", ""},
		{"larger than the cluster's", limited, []Node{node(1, "10.0.0.0/8", "192.0.2.4")}, nil, "outside", ""},
		{"the API server's address", limited, []Node{node(1, "10.244.9.0/24", "192.0.2.4")}, nil, "the API server", ""},
		{"address where containers are", limited, []Node{node(1, "10.244.4.0/24", "10.244.3.7")}, nil, "no usable internal address", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			nodes := append([]Node{good, own}, test.odd...)
			got, err := Of(nodes, own.Name, test.config, hostWith("192.0.2.2/24", "203.0.113.2/31"))
			if err != nil {
				t.Fatal(err)
			}
			var served []string
			for _, peer := range got.Nodes {
				served = append(served, peer.Prefix.String())
			}
			slices.Sort(served)
			want := append([]string{"10.244.3.0/24"}, test.served...)
			slices.Sort(want)
			check(t, "prefixes", served, want)
			checkOnly(t, "skipped", skippedText(got), test.skipped)
			checkOnly(t, "problems", strings.Join(got.Problems, "\n"), test.problem)
		})
	}
}

// TestOtherFamily makes no route of a family that this node's containers have not: its host may have disabled IPv6.
func TestOtherFamily(t *testing.T) {
	nodes := []Node{node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "fd44:2::/64", "192.0.2.2")}
	got, err := Of(nodes, "node-1", config, hostWith("192.0.2.1/24"))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Routes) != 1 || len(got.Nodes) != 1 || got.Nodes[0].Prefix != prefix("10.244.2.0/24") {
		t.Errorf("got routes %+v and peers %+v, want those of 10.244.2.0/24", got.Routes, got.Nodes)
	}
	checkOnly(t, "skipped", skippedText(got), "node-2 fd44:2::/64: this node has no podCIDR of the prefix's family")
}

// TestNarrowTunnel serves IPv4 where IPv6 has too small an MTU.
func TestNarrowTunnel(t *testing.T) {
	narrow := hostWith("192.0.2.1/24")
	narrow.Links[0].MTU = 1320
	got, err := Of([]Node{
		node(1, "10.244.1.0/24", "fd44:1::/64", "192.0.2.1"), node(2, "10.244.2.0/24", "fd44:2::/64", "192.0.2.2"),
	}, "node-1", config, narrow)
	if err != nil {
		t.Fatal(err)
	}
	check(t, "peers", got.Nodes, []maps.Node{{Prefix: prefix("10.244.2.0/24"), Remote: addr("192.0.2.2"), Mode: maps.NodeTunnel, MTU: 1270}})
	checkOnly(t, "skipped", skippedText(got), "node-2 fd44:2::/64: the tunnel's MTU is 1270, less than 1280")
}

// TestOrder requires the same state for any order of nodes, also of those that are equally old.
func TestOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var nodes []Node
	for n := range 60 { // many of them overlap
		bits := 20 + random.IntN(6)
		overlapping := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, byte(random.IntN(30)), 0}), bits).Masked()
		made := node(n, overlapping.String(), fmt.Sprintf("192.0.2.%d", 1+random.IntN(40)))
		made.Created = time.Unix(int64(random.IntN(10)), 0)
		nodes = append(nodes, made)
	}
	nodes = append(nodes, node(100, "10.245.0.0/24", "192.0.2.200"))
	first, err := Of(nodes, "node-100", config, hostWith("192.0.2.200/24"))
	if err != nil {
		t.Fatal(err)
	}
	if len(first.Nodes) == 0 || len(first.Skipped) == 0 {
		t.Fatalf("got %d peers, %d skipped, want some of both", len(first.Nodes), len(first.Skipped))
	}
	for range 20 {
		random.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		again, err := Of(nodes, "node-100", config, hostWith("192.0.2.200/24"))
		if err != nil {
			t.Fatal(err)
		}
		check(t, "state", again, first)
	}
	for i, a := range first.Nodes {
		for _, b := range first.Nodes[:i] {
			if a.Prefix.Overlaps(b.Prefix) {
				t.Errorf("%s of %s overlaps %s of %s", a.Prefix, first.Names[a.Prefix], b.Prefix, first.Names[b.Prefix])
			}
		}
	}
}

// TestNodesAgree requires that no two nodes send to different ones for the same address, unless it is their own.
func TestNodesAgree(t *testing.T) {
	nodes := []Node{
		node(1, "10.244.1.0/24", "192.0.2.1"), node(2, "10.244.2.0/24", "192.0.2.2"),
		node(3, "10.244.2.0/24", "192.0.2.3"), node(4, "10.244.0.0/16", "192.0.2.4"), node(5, "10.244.5.0/24", "192.0.2.5"),
	}
	holders := map[netip.Prefix]string{}
	for n, own := range nodes {
		state, err := Of(nodes, own.Name, config, hostWith(fmt.Sprintf("192.0.2.%d/24", n+1)))
		if err != nil {
			t.Fatal(err)
		}
		for prefix, name := range state.Names {
			if holder := holders[prefix]; holder != "" && holder != name {
				t.Errorf("%s sends %s to %s, others to %s", own.Name, prefix, name, holder)
			}
			holders[prefix] = name
		}
	}
	check(t, "holders", holders, map[netip.Prefix]string{
		prefix("10.244.1.0/24"): "node-1", prefix("10.244.2.0/24"): "node-2", prefix("10.244.5.0/24"): "node-5",
	})
}

func skippedText(s *State) string {
	var lines []string
	for _, skip := range s.Skipped {
		lines = append(lines, fmt.Sprintf("%s %s: %s", skip.Node, skip.Prefix, skip.Reason))
	}
	return strings.Join(lines, "\n")
}

func check(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %+v, want %+v", what, got, want)
	}
}

// checkOnly requires a text with those words, or none.
func checkOnly(t *testing.T, what, got, want string) {
	t.Helper()
	if want == "" && got != "" || !strings.Contains(got, want) {
		t.Errorf("%s: got %q, want %q in it", what, got, want)
	}
}

// TestUnassigned refuses the cluster's prefixes with a tunnel, and otherwise this node's.
func TestUnassigned(t *testing.T) {
	own, cluster := []string{"10.244.1.0/24", "fd44:1::/64"}, []netip.Prefix{prefix("10.244.0.0/16"), prefix("fd44::/16")}
	for _, test := range []struct {
		mode     Mode
		podCIDRs []string
		cluster  []netip.Prefix
		reserved string
		want     string
	}{
		{ModeTunnel, own, cluster, "", "[10.244.0.0/16 fd44::/16]"},
		{ModeAuto, own, cluster, "", "[10.244.0.0/16 fd44::/16]"},
		{ModeDirect, own, cluster, "", "[10.244.1.0/24 fd44:1::/64]"},
		{ModeTunnel, own, nil, "", "[10.244.1.0/24 fd44:1::/64]"},
		{ModeTunnel, own[:1], cluster, "", "[10.244.0.0/16]"}, // the host may have no IPv6
		{ModeTunnel, own, cluster, "10.244.9.9", "[fd44::/16]"},
	} {
		with := config
		with.Mode, with.PodCIDRs = test.mode, test.cluster
		if test.reserved != "" {
			with.Reserved = []netip.Addr{addr(test.reserved)}
		}
		got, err := Of([]Node{node(1, append(slices.Clone(test.podCIDRs), "192.0.2.1")...)}, "node-1", with, dualHost)
		if err != nil {
			t.Fatal(err)
		}
		if text := fmt.Sprint(got.Unassigned); text != test.want {
			t.Errorf("%s, %v, %v: got %s, want %s", test.mode, test.podCIDRs, test.cluster, text, test.want)
		}
	}
}
