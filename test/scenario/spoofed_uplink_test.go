package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Packets from elsewhere with the address of a remote. The host has strict reverse-path filtering, so they must
// have no effect.

// spoofer is where spoofed packets come from.
type spoofer struct {
	name   string
	ns     *testenv.Namespace
	device string
	mac    testenv.MAC // of the node's device
	own    map[string]netip.Addr
	node   map[string]netip.Addr // the node's address on that device
}

const bridgePrefix6 = "fd00:17::"

// spoofers returns a host on a second uplink, and a container of another engine behind a bridge.
func (n *network) spoofers(t *testing.T) []spoofer {
	t.Helper()
	n.AddSecondUplink(t)
	container := n.otherEngine(t)
	if _, err := n.node().Run(testenv.Context(t), "ip", "address", "add", bridgePrefix6+"1/64", "dev", "br9", "nodad"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "the bridge", func() error { return n.node().WaitUp("br9") })
	n.filterReversePath(t)
	return []spoofer{
		{
			"a second uplink", n.SecondOutside, testenv.UplinkName, n.node().MACOf(t, testenv.SecondUplinkName),
			map[string]netip.Addr{"IPv4": testenv.SecondOutsideAddr4, "IPv6": testenv.SecondOutsideAddr6},
			map[string]netip.Addr{"IPv4": testenv.SecondNodeAddr4, "IPv6": testenv.SecondNodeAddr6},
		},
		{
			"a bridge of another engine", container, "eth0", n.node().MACOf(t, "br9"),
			map[string]netip.Addr{"IPv4": netip.MustParseAddr("172.17.0.2"), "IPv6": netip.MustParseAddr(bridgePrefix6 + "2")},
			map[string]netip.Addr{"IPv4": netip.MustParseAddr("172.17.0.1"), "IPv6": netip.MustParseAddr(bridgePrefix6 + "1")},
		},
	}
}

// filterReversePath makes the node drop what comes by the wrong device. IPv6 has no sysctl for that.
func (n *network) filterReversePath(t *testing.T) {
	t.Helper()
	for _, conf := range []string{"all", "default", testenv.UplinkName, testenv.SecondUplinkName, "br9"} {
		if err := n.node().SetSysctl("net/ipv4/conf/"+conf+"/rp_filter", "1"); err != nil {
			t.Fatal(err)
		}
	}
	n.nft(t, `table ip6 reverse { chain prerouting { type filter hook prerouting priority -300; policy accept;
		iifname eth1 ip6 saddr 2001:db8:1::/64 drop; iifname eth1 ip6 saddr fd00:88::/64 drop
		iifname br9 ip6 saddr 2001:db8:1::/64 drop; iifname br9 ip6 saddr fd00:88::/64 drop
	} }`)
}

// send sends packets, and returns when the node has had them all.
func (s spoofer) send(t *testing.T, n *network, f testenv.Family, packets []testenv.Packet) {
	t.Helper()
	last := listenPacket(t, n.node(), at(s.node[f.Name], 0))
	defer last.Close()
	packets = append(packets, testenv.UDPPacket(at(s.own[f.Name], 9), portOf(last.LocalAddr()), "last"))
	var frames [][]byte
	for _, packet := range packets {
		packet.SrcMAC, packet.DstMAC = s.ns.MACOf(t, s.device), s.mac
		frames = append(frames, packet.MustBuild())
	}
	if err := s.ns.SendFrames(s.device, frames...); err != nil {
		t.Fatal(err)
	}
	if payload, _ := receiveFrom(t, last); payload != "last" {
		t.Fatalf("node: got %q, want the last packet", payload)
	}
}

// spoofed returns one packet of each kind between two addresses.
func spoofed(protocol string, from, to netip.AddrPort) (packets []testenv.Packet) {
	if protocol == "udp" {
		return []testenv.Packet{testenv.UDPPacket(from, to, "forged")}
	}
	for _, flags := range []uint8{
		testenv.SYN, testenv.ACK | testenv.PSH, testenv.RST, testenv.RST | testenv.ACK,
		testenv.FIN | testenv.ACK, testenv.SYN | testenv.ACK,
	} {
		payload := ""
		if flags&testenv.PSH != 0 {
			payload = "forged"
		}
		packets = append(packets, testenv.TCPPacket(from, to, flags, payload))
	}
	return packets
}

// plainKeys leave sibling(f.Outside, 50) without masquerading.
const plainKeys = `"ipMasq": true, "nonMasqueradeCIDRs": ["192.0.2.50/32", "2001:db8:1::50/128"]`

// plainAddr is an address of the host outside that is not masqueraded.
func (n *network) plainAddr(t *testing.T, f testenv.Family) netip.Addr {
	t.Helper()
	addr := netip.MustParseAddr(map[string]string{"IPv4": "192.0.2.50", "IPv6": "2001:db8:1::50"}[f.Name])
	args := []string{"address", "replace", netip.PrefixFrom(addr, f.PrefixLen).String(), "dev", testenv.UplinkName}
	if addr.Is6() {
		args = append(args, "nodad")
	}
	if _, err := n.Outside.Run(testenv.Context(t), "ip", args...); err != nil {
		t.Fatal(err)
	}
	return addr
}

// twoPorts leads host ports 8080 and 8081 to port 80.
func twoPorts() map[string]any {
	var mappings []mapping
	for _, protocol := range []string{"tcp", "udp"} {
		for _, port := range []uint16{8080, 8081} {
			mappings = append(mappings, mapping{HostPort: port, ContainerPort: 80, Protocol: protocol})
		}
	}
	return portMappings(mappings...)
}

// Spoofed packets to every address and port of open connections change, end and redirect none.
func TestSpoofedPacketsOfConnections(t *testing.T) {
	forEachFastPath(t, plainKeys, func(t *testing.T, conflist string) {
		n := newRoutedNetwork(t, conflist)
		spoofers := n.spoofers(t)
		a, web := n.AddPod(t, "a", mapBoth(8090, 90)), n.AddPod(t, "web", twoPorts())
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			plain := n.plainAddr(t, f)
			onWeb, onOutside, onPlain, onA := at(f.Pod(web), 80), at(f.Outside, 80), at(plain, 80), at(f.Pod(a), 90)
			open := func(p path) *pair { return openPair(t, protocol, p) }
			hostPort := open(path{"host port", n.Outside, web.Namespace, onWeb, at(f.Node, 8080)})
			masqueraded := open(path{"masqueraded", a.Namespace, n.Outside, onOutside, onOutside})
			inbound := open(path{"direct, inbound", n.Outside, a.Namespace, onA, onA})
			outbound := open(path{"direct, outbound", a.Namespace, n.Outside, onPlain, onPlain})
			all := pairs{hostPort, masqueraded, inbound, outbound}
			for range offloadRequests {
				all.exchange(t)
			}
			seen := masqueraded.seen()
			if seen.Addr() != f.Node || outbound.seen() != outbound.own() {
				t.Fatalf("outside sees %s and %s, want the node's address and the pod's", seen, outbound.seen())
			}
			for _, s := range spoofers {
				targets := map[netip.AddrPort][]netip.AddrPort{
					hostPort.own(): {
						at(f.Node, 8080), at(s.node[f.Name], 8080), at(f.SecondNode, 8080), at(f.Gateway, 8080),
						at(f.Node, 8081), at(f.SecondNode, 8081), onWeb,
					},
					onOutside:     {seen, at(f.SecondNode, seen.Port()), at(f.Gateway, seen.Port()), masqueraded.own(), outbound.own()},
					inbound.own(): {onA, at(f.Node, 8090), at(f.SecondNode, 8090)},
					onPlain:       {outbound.own(), at(f.Node, outbound.own().Port()), at(f.SecondNode, outbound.own().Port())},
				}
				var packets []testenv.Packet
				for from, addrs := range targets {
					for _, to := range addrs {
						packets = append(packets, spoofed(protocol, from, to)...)
					}
				}
				for range 3 {
					before := n.translations(t)
					s.send(t, n, f, packets)
					n.wantTranslations(t, s.name, before)
					all.fromServers(t)
					if !t.Failed() {
						all.fromClients(t)
					}
					if t.Failed() {
						t.Fatalf("after packets from %s", s.name)
					}
				}
			}
		})
	})
}

// flowID is what identifies a flow.
type flowID struct {
	kind          bpf.FlowKind
	protocol      maps.Protocol
	remote, local netip.AddrPort
}

// translations returns all flows.
func (n *network) translations(t *testing.T) map[flowID]maps.Flow {
	t.Helper()
	all := map[flowID]maps.Flow{}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, flow := range must(maps.Flows(datapath)) {
			all[flowID{flow.Kind, flow.Protocol, flow.Remote, flow.Local}] = flow
		}
	})
	return all
}

// wantTranslations wants flows to be as before.
func (n *network) wantTranslations(t *testing.T, after string, before map[flowID]maps.Flow) {
	t.Helper()
	now := n.translations(t)
	for id, old := range before {
		if flow := now[id]; flow != old {
			t.Errorf("flow after packets from %s: got %s, want %s", after, flow, old)
		}
	}
}
