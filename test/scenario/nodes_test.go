package scenario

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	tunnelName = "vx0"
	tunnelPort = 4789
)

// node is a node of a cluster: a network whose pods have a prefix of their own.
type node struct {
	*network
	pod      *testenv.Pod
	subnets  [2]netip.Prefix // in the order of testenv.Families
	gateways [2]netip.Addr
}

// newNodes makes two nodes on one link, instead of a topology's node and its host outside. Each has a pod.
func newNodes(t *testing.T, keys string) (a, b *node) {
	t.Helper()
	first := newNetworkWith(t, nodeConflist("node-a", 1, keys))
	topology := &testenv.Topology{Node: first.Outside, Outside: first.node()}
	second := &network{topology, testenv.NewRuntime(t, topology.Node, []byte(nodeConflist("node-b", 2, keys)), filepath.Dir(testenv.Build(t, "./cmd/ebpfnet")))}
	t.Cleanup(func() { second.unload(t) })
	t.Cleanup(func() { second.wantNothingLeft(t) })
	return newNode(t, first, 1), newNode(t, second, 2)
}

func newNode(t *testing.T, n *network, number int) *node {
	t.Helper()
	v4, v6 := fmt.Sprintf("10.88.%d.", number), fmt.Sprintf("fd00:88:%d::", number)
	return &node{
		network: n, pod: n.AddPod(t, "pod-"+n.Network(), nil),
		subnets:  [2]netip.Prefix{netip.MustParsePrefix(v4 + "0/24"), netip.MustParsePrefix(v6 + "/64")},
		gateways: [2]netip.Addr{netip.MustParseAddr(v4 + "1"), netip.MustParseAddr(v6 + "1")},
	}
}

func nodeConflist(name string, number int, keys string) string {
	return strings.NewReplacer(
		`"pods"`, strconv.Quote(name),
		"10.88.0.0/24", fmt.Sprintf("10.88.%d.0/24", number), "fd00:88::/64", fmt.Sprintf("fd00:88:%d::/64", number),
	).Replace(withKeys(keys))
}

// reachByTunnel has the node reach the other one, at remote, as its agent would. own is the address by which the
// other one knows this node; invalid: the one that the route has.
func (n *node) reachByTunnel(t *testing.T, other *node, remote, own netip.Addr, mtu int) {
	t.Helper()
	n.ip(t, "link", "add", tunnelName, "mtu", strconv.Itoa(mtu), "type", "vxlan", "external", "dstport", strconv.Itoa(tunnelPort), "nolearning")
	n.ip(t, "link", "set", tunnelName, "arp", "off", "addrgenmode", "none")
	n.withDatapath(t, func(datapath *loader.Datapath) {
		tunnel := maps.Tunnel{
			IfIndex: indexOf(t, n.node(), tunnelName), VNI: vni, Port: tunnelPort, Containers4: n.subnets[0], Containers6: n.subnets[1],
		}
		if own.Is4() {
			tunnel.Addr4 = own
		} else {
			tunnel.Addr6 = own
		}
		testenv.Must(t, refresh.Tunnel(testenv.Context(t), datapath, tunnel))
		if got, err := maps.GetTunnel(datapath); err != nil || got != tunnel {
			t.Fatalf("tunnel: got %+v, %v, want %+v", got, err, tunnel)
		}
	})
	n.setNodes(t, other, [2]netip.Addr{remote, remote}, maps.NodeTunnel, mtu)
	n.ip(t, "link", "set", tunnelName, "up")
	encap := []string{"encap", "ip", "id", strconv.Itoa(vni), "dst", remote.String()}
	if own.IsValid() {
		encap = append(encap, "src", own.String())
	}
	if remote.Is6() { // without a checksum, the receiver drops the packets
		encap[1] = "ip6"
		encap = append(encap, "csum")
	}
	for i, subnet := range other.subnets {
		n.ip(t, append([]string{"route", "add", subnet.String(), "src", n.gateways[i].String(), "proto", "235", "dev", tunnelName}, encap...)...)
	}
}

// leave removes all that reachByTunnel has made, and wants no trace of it.
func (n *node) leave(t *testing.T) {
	t.Helper()
	index := indexOf(t, n.node(), tunnelName)
	n.ip(t, "link", "del", tunnelName) // with its routes
	n.withDatapath(t, func(datapath *loader.Datapath) {
		testenv.Must(t, maps.With(testenv.Context(t), datapath, func(store *maps.Store) error {
			return errors.Join(store.SetNodes(nil), store.SetTunnel(maps.Tunnel{}), datapath.DetachUplink(index), store.DeleteUplink(index))
		}))
		if nodes := must(maps.Nodes(datapath)); len(nodes) > 0 {
			t.Errorf("nodes: got %v, want none", nodes)
		}
		if tunnel, err := maps.GetTunnel(datapath); err != nil || tunnel != (maps.Tunnel{}) {
			t.Errorf("tunnel: got %+v, %v, want none", tunnel, err)
		}
		n.wantUplink(t, index, false)
	})
}

// reachDirectly has the node reach the other one by its addresses.
func (n *node) reachDirectly(t *testing.T, other *node, remotes [2]netip.Addr) {
	t.Helper()
	n.setNodes(t, other, remotes, maps.NodeDirect, 1500)
	for i, subnet := range other.subnets {
		n.ip(t, "route", "add", subnet.String(), "via", remotes[i].String(), "src", n.gateways[i].String(), "proto", "235")
	}
}

func (n *node) setNodes(t *testing.T, other *node, remotes [2]netip.Addr, mode maps.NodeMode, mtu int) {
	t.Helper()
	var nodes []maps.Node
	for i, subnet := range other.subnets {
		nodes = append(nodes, maps.Node{Prefix: subnet, Remote: remotes[i], Mode: mode, MTU: mtu})
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		testenv.Must(t, maps.With(testenv.Context(t), datapath, func(store *maps.Store) error { return store.SetNodes(nodes) }))
	})
}

// forEachUnderlay runs a subtest for two nodes that reach each other's pods over IPv4, and then over IPv6.
func forEachUnderlay(t *testing.T, a, b *node, test func(t *testing.T, under testenv.Family)) {
	testenv.Require(t, testenv.VXLAN)
	for _, under := range testenv.Families {
		t.Run("over "+under.Name, func(t *testing.T) {
			a.reachByTunnel(t, b, under.Outside, netip.Addr{}, tunnelMTU(under))
			b.reachByTunnel(t, a, under.Node, netip.Addr{}, tunnelMTU(under))
			t.Cleanup(func() {
				a.leave(t)
				b.leave(t)
			})
			test(t, under)
		})
	}
}

func tunnelMTU(under testenv.Family) int {
	const linkMTU, headers4, headers6 = 1500, 50, 70
	if under.Is4() {
		return linkMTU - headers4
	}
	return linkMTU - headers6
}

// Pods of two nodes reach each other under their own addresses. Their connections bypass both stacks.
func TestTunnelBetweenNodes(t *testing.T) {
	for _, path := range []string{"never", "established", "always"} {
		t.Run(path, func(t *testing.T) {
			a, b := newNodes(t, `"ipMasq": true, "mtu": 1430, "fastPath": "`+path+`"`)
			a.nft(t, forwarded)
			b.nft(t, forwarded)
			forEachUnderlay(t, a, b, func(t *testing.T, _ testenv.Family) {
				forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
					ping(t, a.pod.Namespace, f.Pod(b.pod))
					server := serve(t, b.pod.Namespace, protocol, at(f.Pod(b.pod), 0))
					reachUntranslated(t, a.pod.Namespace, protocol, server, b.pod.Namespace)
					wantOffloaded(t, path, protocol, a, b, server)
				})
				for _, f := range testenv.Families {
					receiver, datagram := listenPacket(t, b.pod.Namespace, at(f.Pod(b.pod), 7000)), strings.Repeat("fragments", 500)
					sendTo(t, listenPacket(t, a.pod.Namespace, at(f.Pod(a.pod), 0)), at(f.Pod(b.pod), 7000), datagram)
					if got, _ := receiveFrom(t, receiver); got != datagram {
						t.Errorf("got %d bytes in fragments, want %d", len(got), len(datagram))
					}
					large, server := sizeOf(8*mebibyte), at(f.Pod(b.pod), 7000)
					upload(large)(t, a.pod.Namespace, b.pod.Namespace, server, server)
					download(large)(t, a.pod.Namespace, b.pod.Namespace, server, server)
				}
			})
			for _, n := range []*node{a, b} {
				if got := n.dropsFor(t, bpf.ReasonNode); got != 0 { // conntrack updates and fragments, too, are admitted
					t.Errorf("%s took %d packets for forged, want none", n.node().Name, got)
				}
			}
		})
	}
}

// wantOffloaded wants the packets of an open connection to bypass the stacks of both nodes, or to pass them.
func wantOffloaded(t *testing.T, path, protocol string, a, b *node, server netip.AddrPort) {
	t.Helper()
	const requests = 50

	client := connect(t, a.pod.Namespace, protocol, netip.AddrPort{}, server)
	defer client.Close()
	askOften(t, client, b.pod.Namespace)
	before := [2]int{a.forwarded(t), b.forwarded(t)}
	for range requests {
		ask(t, client, b.pod.Namespace)
	}
	for i, n := range []*node{a, b} {
		count := n.forwarded(t) - before[i]
		if bypassed := count < requests; bypassed != (path != "never") {
			t.Errorf("the stack of %s forwarded %d packets of %d requests, want fastPath %s", n.node().Name, count, requests, path)
		}
	}
}

// Pods whose MTU is larger than the tunnel's learn of it.
func TestTunnelTellsMTU(t *testing.T) {
	for _, path := range []string{"established", "always"} {
		t.Run(path, func(t *testing.T) {
			a, b := newNodes(t, `"ipMasq": true, "mtu": 1500, "fastPath": "`+path+`"`)
			forEachUnderlay(t, a, b, func(t *testing.T, _ testenv.Family) {
				for _, f := range testenv.Families {
					large, server := sizeOf(mebibyte), at(f.Pod(b.pod), 7000)
					upload(large)(t, a.pod.Namespace, b.pod.Namespace, server, server)
				}
			})
		})
	}
}

// By direct routes, traffic between nodes is not masqueraded either.
func TestDirectRoutesBetweenNodes(t *testing.T) {
	for _, path := range []string{"auto", "always"} { // auto sees the rules
		t.Run(path, func(t *testing.T) {
			a, b := newNodes(t, `"ipMasq": true, "fastPath": "`+path+`"`)
			a.reachDirectly(t, b, [2]netip.Addr{testenv.IPv4.Outside, testenv.IPv6.Outside})
			b.reachDirectly(t, a, [2]netip.Addr{testenv.IPv4.Node, testenv.IPv6.Node})
			a.nft(t, forwarded)
			b.nft(t, forwarded)
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				ping(t, a.pod.Namespace, f.Pod(b.pod))
				server := serve(t, b.pod.Namespace, protocol, at(f.Pod(b.pod), 0))
				reachUntranslated(t, a.pod.Namespace, protocol, server, b.pod.Namespace)
				wantOffloaded(t, path, protocol, a, b, server)
				client := at(f.Pod(a.pod), 4000).String()
				want := "sent by eth0, as " + client + " > " + server.String()
				if out := a.ctl(t, "trace", client, server.String()+"/"+protocol); !strings.Contains(out, want) {
					t.Errorf("trace does not print %q: %s", want, out)
				}
			})
		})
	}
}

// A node that leaves its cluster masquerades what is another network for it then.
func TestNodeLeavesCluster(t *testing.T) {
	testenv.Require(t, testenv.VXLAN)
	a, b := newNodes(t, `"ipMasq": true, "mtu": 1430`)
	a.reachByTunnel(t, b, testenv.IPv4.Outside, netip.Addr{}, tunnelMTU(testenv.IPv4))
	a.leave(t)
	for i, f := range testenv.Families {
		a.ip(t, "route", "add", b.subnets[i].String(), "via", f.Outside.String())
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, b.pod.Namespace, protocol, at(f.Pod(b.pod), 0))
		reachAsNode(t, a.pod.Namespace, protocol, server, b.pod.Namespace, f.Node)
	})
}

// A node that its peers know by another address than its routes' sends from that, by the stack and past it.
func TestTunnelFromAnotherAddress(t *testing.T) {
	testenv.Require(t, testenv.VXLAN)
	testenv.Require(t, testenv.TunnelSource)
	for _, path := range []string{"established", "always"} {
		t.Run(path, func(t *testing.T) {
			a, b := newNodes(t, `"ipMasq": true, "mtu": 1430, "fastPath": "`+path+`"`)
			a.nft(t, forwarded)
			b.nft(t, forwarded)
			for _, under := range testenv.Families {
				known := map[string]netip.Addr{"IPv4": netip.MustParseAddr("192.0.2.77"), "IPv6": netip.MustParseAddr("2001:db8:1::77")}[under.Name]
				b.ip(t, "address", "add", netip.PrefixFrom(known, under.PrefixLen).String(), "dev", testenv.UplinkName, "preferred_lft", "0")
				a.reachByTunnel(t, b, known, netip.Addr{}, tunnelMTU(under))
				b.reachByTunnel(t, a, under.Node, known, tunnelMTU(under))
				forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
					ping(t, b.pod.Namespace, f.Pod(a.pod))
					server := serve(t, b.pod.Namespace, protocol, at(f.Pod(b.pod), 0))
					reachUntranslated(t, a.pod.Namespace, protocol, server, b.pod.Namespace)
					wantOffloaded(t, path, protocol, a, b, server)
				})
				a.leave(t)
				b.leave(t)
			}
		})
	}
}

const vni = 7

// inTunnel returns the frame of a pod with a datagram in VXLAN.
func (n *network) inTunnel(t *testing.T, f testenv.Family, pod *testenv.Pod, node netip.AddrPort, device string, from, to netip.AddrPort, payload string) []byte {
	t.Helper()
	inner := testenv.UDPPacket(from, to, payload)
	inner.SrcMAC, inner.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 9}, n.node().MACOf(t, device)
	header := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, vni<<8)
	outer := testenv.UDPPacket(at(f.Pod(pod), 5000), node, string(header)+string(inner.MustBuild()))
	outer.SrcMAC, outer.DstMAC = pod.MACOf(t, testenv.PodIfName), pod.HostMAC(t)
	return outer.MustBuild()
}

// ip runs the command on the node.
func (n *network) ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := n.node().Run(testenv.Context(t), "ip", args...); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}
