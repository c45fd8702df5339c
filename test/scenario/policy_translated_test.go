package scenario

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// masqueradingService translates a service's address to a pod's, and the client's to the node's.
func masqueradingService(web *testenv.Pod) string {
	return serviceRules(web) + fmt.Sprintf(` table inet masquerading { chain post { type nat hook postrouting priority 100; policy accept;
		ip saddr 10.88.0.0/15 ip daddr %s masquerade
		ip6 saddr fd00::/16 ip6 daddr %s masquerade
	} }`, web.Addr4(), web.Addr6())
}

// serviceAway translates the addresses after those of serviceOf to the outside host's.
const serviceAway = ` table inet away { chain pre { type nat hook prerouting priority -100; policy accept;
	ip daddr 10.96.0.2 dnat ip to 192.0.2.2
	ip6 daddr fd00:96::2 dnat ip6 to 2001:db8:1::2
} }`

// A host port or a service translates both sides of a connection. The rules judge the real client, the container
// that serves, and its own port, and they admit its replies.
func TestPolicyOfTranslated(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		keys := strings.SplitN(strings.SplitN(conflist, `"type": "ebpfnet",`, 2)[1], `"capabilities"`, 2)[0]
		add := func(name, policy string, ports map[string]any) *testenv.Pod {
			return n.addWith(t, name, strings.TrimSuffix(strings.TrimSpace(keys), ",")+`, "policy": `+policy, ports)
		}
		second, outside := n.secondNetwork(t), `{"cidr": "192.0.2.2/32"}, {"cidr": "2001:db8:1::2/128"}`
		node := `{"cidr": "192.0.2.1/32"}, {"cidr": "2001:db8:1::1/128"}`
		services := `{"cidr": "10.96.0.0/16"}, {"cidr": "fd00:96::/64"}`
		onWeb, onHostPort := `"ports": [{"port": 80}, {"protocol": "udp", "port": 80}]`, `"ports": [{"port": 8080}, {"protocol": "udp", "port": 8080}]`
		friend, stranger := n.AddPod(t, "friend", nil), second.AddPod(t, "stranger", nil)
		web := add("web", `{"egress": [], "ingress": [{"from": [{"network": "second"}, `+outside+`], `+onWeb+`},
			{"from": [{"sameNetwork": true}, `+node+`], `+onHostPort+`}]}`, mapBoth(8080, 80))
		any := add("any", `{"egress": []}`, mapBoth(8081, 80))
		client := add("client", `{"ingress": [], "egress": [{"to": [{"sameNetwork": true}], `+onWeb+`}]}`, nil)
		fooled := add("fooled", `{"ingress": [], "egress": [{"to": [`+node+`, `+services+`]}, {`+onHostPort+`}]}`, nil)
		closed := add("closed", `{"ingress": []}`, nil)
		hasServices := !strings.Contains(conflist, `"always"`)
		if hasServices {
			n.nft(t, masqueradingService(any)+serviceAway)
		}
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			probe := protocol + "80"
			for _, server := range []*testenv.Pod{web, any} {
				serve(t, server.Namespace, protocol, at(f.Pod(server), 80))
			}
			for _, row := range []struct {
				from     *testenv.Namespace
				admitted bool
			}{{n.Outside, true}, {stranger.Namespace, true}, {n.node(), true}, {web.Namespace, true}, {friend.Namespace, false}} {
				n.wantProbe(t, probe+"80", row.from, web.Namespace, f.Node, web, row.admitted, reasonPolicy)
			}
			n.wantProbe(t, probe+"80", n.node(), web.Namespace, f.Loopbacks[0], web, true, reasonPolicy)
			if hasServices {
				serve(t, n.Outside, protocol, at(f.Outside, 80))
				n.wantProbe(t, probe, closed.Namespace, n.Outside, serviceOf(f).Next(), closed, true, reasonPolicy)
			}
			for pod, admitted := range map[*testenv.Pod]bool{client: true, fooled: false} {
				n.wantProbe(t, probe, pod.Namespace, any.Namespace, f.Pod(any), pod, admitted, reasonPolicyEgress)
				n.wantProbe(t, probe+"81", pod.Namespace, any.Namespace, f.Node, pod, admitted, reasonPolicyEgress)
				if hasServices {
					n.wantProbe(t, probe, pod.Namespace, any.Namespace, serviceOf(f), pod, admitted, reasonPolicyEgress)
				}
			}
		})
	})
}

// The rules admit an address and one pod, to which the host then translates it, but not another pod. Nor do they after the first
// packet, nor if the address has been the admitted pod's or its own before.
func TestPolicyOfEachPacket(t *testing.T) {
	for _, path := range []string{"never", "established"} {
		t.Run(path, func(t *testing.T) {
			keys := `"ipMasq": true, "fastPath": "` + path + `"`
			n := newNetworkWith(t, withKeys(keys))
			web, admitted := n.AddPod(t, "web", nil), n.secondNetwork(t).AddPod(t, "admitted", nil)
			client := n.addWith(t, "client", keys+`, "policy": {"egress": [{"to": [{"network": "second"}, {"cidr": "192.0.2.2/32"}, {"cidr": "2001:db8:1::2/128"}]}]}`, nil)
			for _, f := range testenv.Families {
				to := at(f.Outside, 80)
				servers := map[string]*net.UDPConn{"outside": listenPacket(t, n.Outside, to), "admitted": listenPacket(t, admitted.Namespace, at(f.Pod(admitted), 80))}
				serve(t, admitted.Namespace, "tcp", at(f.Pod(admitted), 80))
				early, late := listenPacket(t, client.Namespace, at(f.Pod(client), 5000)), listenPacket(t, client.Namespace, at(f.Pod(client), 5001))
				wantArrival := func(socket *net.UDPConn, name string) {
					for range 3 {
						sendTo(t, socket, to, name)
						if payload, _ := receiveFrom(t, servers[name]); payload != name {
							t.Errorf("%s: got %q, want %q", f.Name, payload, name)
						}
					}
				}
				wantDrop := func(what string, send func()) {
					n.awaitDrops(t, f.Name+": "+what, client, reasonPolicyEgress, 1, send)
				}
				wantDrops := func(socket *net.UDPConn, when string) {
					for i := range 3 {
						wantDrop(fmt.Sprintf("packet %d %s", i, when), func() { sendTo(t, socket, to, "not admitted") })
					}
				}
				wantArrival(early, "outside")
				n.translate(t, web)
				wantDrops(early, "after the address itself")
				wantDrops(late, "at first")
				for _, flags := range []uint8{testenv.SYN, testenv.ACK} {
					wantDrop(fmt.Sprintf("TCP with flags %x", flags), func() { wireOf(t, client).send(t, testenv.TCPPacket(at(f.Pod(client), 5002), to, flags, "")) })
					n.flush(t) // conntrack takes the ACK for a new connection
				}
				n.translate(t, admitted)
				wantArrival(late, "admitted")
				connection := connect(t, client.Namespace, "tcp", netip.AddrPort{}, to)
				ask(t, connection, admitted.Namespace)
				n.translate(t, web)
				wantDrop("a segment of a connection that conntrack has forgotten", func() {
					wireOf(t, client).send(t, testenv.TCPPacket(connection.Local(), to, testenv.ACK, "x"))
				})
				connection.Close()
				wantDrops(late, "after the admitted pod")
				n.nft(t, "delete table inet services")
				n.flush(t)
			}
		})
	}
}

// translate has the host translate the outside's addresses to a pod's, of present connections, too.
func (n *network) translate(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	n.nft(t, "table inet services; delete table inet services; "+strings.NewReplacer("10.96.0.1", "192.0.2.2", "fd00:96::1", "2001:db8:1::2").Replace(serviceRules(pod)))
	n.flush(t)
}

// The host's routes lead an address to another container than the one that has it. The rules judge who receives the packet.
func TestPolicyOfReroutedAddress(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "never"`))
	peer := n.secondNetwork(t).AddPod(t, "peer", nil)
	thief := n.addWith(t, "thief", `"ipMasq": true, "fastPath": "never", "antiSpoof": false`, nil)
	pod := n.addWith(t, "pod", `"ipMasq": true, "fastPath": "never", "policy": {"egress": [{"to": [{"network": "second"}]}]}`, nil)
	device := thief.Result.Interfaces[0].Name
	for _, f := range testenv.Families {
		serve(t, peer.Namespace, "udp", at(f.Pod(peer), 80))
		n.wantProbe(t, "udp80", pod.Namespace, peer.Namespace, f.Pod(peer), pod, true, reasonPolicyEgress)
		addr := netip.PrefixFrom(f.Pod(peer), f.Pod(peer).BitLen()).String()
		run(t, thief, "ip", "addr", "add", addr, "dev", testenv.PodIfName, "nodad")
		n.ip(t, "route", "replace", addr, "dev", device)
		n.ip(t, "neigh", "replace", f.Pod(peer).String(), "lladdr", thief.MACOf(t, testenv.PodIfName).String(), "dev", device)
		serve(t, thief.Namespace, "udp", at(f.Pod(peer), 80))
		n.wantProbe(t, "udp80", n.node(), thief.Namespace, f.Pod(peer), pod, true, reasonPolicyEgress)
		n.wantProbe(t, "udp80", pod.Namespace, thief.Namespace, f.Pod(peer), pod, false, reasonPolicyEgress)
	}
}

// Whatever the uplink is made of, the rules judge each packet once, as it leaves or arrives.
func TestPolicyByUplinkKinds(t *testing.T) {
	for _, kind := range testenv.UplinkKinds {
		t.Run(kind.Name, func(t *testing.T) {
			testenv.Require(t, kind.Feature)
			n := newNetwork(t)
			n.MoveUplink(t, kind)
			both := `[{"port": 80}, {"protocol": "udp", "port": 80}]`
			pod := n.addWith(t, "pod", `"ipMasq": true, "policy": {"ingress": [{"ports": `+both+`}], "egress": [{"ports": `+both+`}]}`, mapBoth(8080, 80))
			n.wantByUplink(t, pod)
		})
	}
}

// wantByUplink wants port 80 to be admitted from and to the outside, and nothing else. The pod has host port 8080.
func (n *network) wantByUplink(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	for _, f := range testenv.Families {
		servePolicyProbes(t, n.Outside, f.Outside)
		servePolicyProbes(t, pod.Namespace, f.Pod(pod))
		n.RouteTo(t, f.PodSubnet)
		for _, probe := range policyProbes {
			admitted := strings.HasSuffix(probe, "80")
			n.wantProbe(t, probe, pod.Namespace, n.Outside, f.Outside, pod, admitted, reasonPolicyEgress)
			n.wantProbe(t, probe, n.Outside, pod.Namespace, f.Pod(pod), pod, admitted, reasonPolicy)
		}
		n.wantProbe(t, "tcp8080", n.Outside, pod.Namespace, f.Node, pod, true, reasonPolicy)
	}
}

// Behind another plugin's device, the rules hold too.
func TestPolicyChained(t *testing.T) {
	for name, first := range firstPlugins {
		t.Run(name, func(t *testing.T) {
			n := newChain(t, first, `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true}, "policy": {
				"ingress": [{"ports": [{"port": 80}, {"protocol": "udp", "port": 80}]}], "egress": [{"ports": [{"port": 80}, {"protocol": "udp", "port": 80}]}]}}`)
			pod, a := n.AddPod(t, "pod", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
			wantCheck(t, pod)
			n.wantByUplink(t, pod)
			for _, f := range testenv.Families {
				servePolicyProbes(t, a.Namespace, f.Pod(a))
				servePolicyProbes(t, n.node(), f.Gateway)
				for _, probe := range policyProbes {
					n.wantProbe(t, probe, pod.Namespace, a.Namespace, f.Pod(a), pod, strings.HasSuffix(probe, "80"), reasonPolicyEgress)
					n.wantProbe(t, probe, pod.Namespace, n.node(), f.Gateway, pod, true, reasonPolicyEgress)
					n.wantProbe(t, probe, n.node(), pod.Namespace, f.Pod(pod), pod, true, reasonPolicy)
				}
				n.wantProbe(t, "tcp8080", a.Namespace, pod.Namespace, f.Node, pod, true, reasonPolicy)
			}
		})
	}
}

// A second interface has rules of its own, and neither lends nor borrows those of the first. A connection's tuple,
// used again, is judged anew.
func TestPolicyOfSecondInterfaceAndReusedPort(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true`))
	friend, stranger := n.AddPod(t, "friend", nil), n.secondNetwork(t).AddPod(t, "stranger", nil)
	pod := n.addWith(t, "pod", `"ipMasq": true, "policy": {"ingress": [{"ports": [{"port": 7}]}], "egress": [{"to": [{"sameNetwork": true}]}]}`, nil)
	second := n.secondNetwork(t)
	conf := *pod.Conf
	conf.IfName = "eth1"
	added, err := second.Add(testenv.Context(t), &conf)
	testenv.Must(t, err)
	t.Cleanup(func() {
		testenv.NoError(t, second.Del(context.Background(), &conf))
	})
	for i, f := range testenv.Families {
		addr, _ := netip.AddrFromSlice(added.IPs[i].Address.IP)
		serve(t, pod.Namespace, "tcp", at(addr.Unmap(), 80))
		serve(t, pod.Namespace, "tcp", at(f.Pod(pod), 80))
		serve(t, stranger.Namespace, "tcp", at(f.Pod(stranger), 80))
		server := serve(t, friend.Namespace, "tcp", at(f.Pod(friend), 80))
		n.wantProbe(t, "tcp80", friend.Namespace, pod.Namespace, f.Pod(pod), pod, false, reasonPolicy)
		for _, from := range []*testenv.Pod{friend, stranger} {
			n.wantProbe(t, "tcp80", from.Namespace, pod.Namespace, addr.Unmap(), pod, true, reasonPolicy)
		}
		n.wantProbe(t, "tcp80", pod.Namespace, stranger.Namespace, f.Pod(stranger), pod, true, reasonPolicyEgress) // by eth1
		n.awaitDrops(t, "a SYN to the stranger by eth0", pod, reasonPolicyEgress, 1, func() {
			wireOf(t, pod).send(t, testenv.TCPPacket(at(f.Pod(pod), 5000), at(f.Pod(stranger), 80), testenv.SYN, ""))
		})

		client := connect(t, pod.Namespace, "tcp", netip.AddrPort{}, server)
		ask(t, client, friend.Namespace)
		local := client.Local()
		testenv.Must(t, client.Reset())
		n.awaitDrops(t, "a SYN of the former tuple", pod, reasonPolicy, 1, func() {
			wireOf(t, friend).send(t, testenv.TCPPacket(server, local, testenv.SYN, ""))
		})
	}
}

// The rules for a container's packets to its node hold also where its device does not forward, and route lookups of programs fail.
func TestEgressRulesWithoutForwarding(t *testing.T) {
	n := newNetwork(t)
	free := n.AddPod(t, "free", nil)
	jailed := n.addWith(t, "jailed", `"policy": {"host": false, "egress": []}`, nil)
	for _, pod := range []*testenv.Pod{jailed, free} {
		device, err := n.node().Netlink().LinkByIndex(n.hostDeviceOf(t, pod))
		testenv.Must(t, err)
		for _, family := range []string{"ipv4", "ipv6"} {
			testenv.Must(t, n.node().SetSysctl("net/"+family+"/conf/"+device.Attrs().Name+"/forwarding", "0"))
		}
	}
	for _, f := range testenv.Families {
		servePolicyProbes(t, n.node(), f.Node)
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		n.wantProbe(t, protocol+"80", free.Namespace, n.node(), f.Node, free, true, reasonPolicyEgress)
		n.wantProbe(t, protocol+"80", jailed.Namespace, n.node(), f.Node, jailed, false, reasonPolicyEgress)
	})
}
