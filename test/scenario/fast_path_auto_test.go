package scenario

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// hookRow is something that the host's stack does with forwarded packets.
type hookRow struct {
	name    string
	feature testenv.Feature // that it needs; none: every kernel has it
	on, off string          // commands on the node, one a line
	stays   bool            // hooks stay when it is off
	present bool            // its hooks are there before it is on
	because string          // what `ebpfnetctl status` says about it
	outside bool            // at the uplink: connections between pods do not pass it
}

// hookRows let all packets pass, except those that conntrack does not know.
var hookRows = []hookRow{
	{
		name: "nft", because: "netfilter hooks",
		on:  `nft 'table inet own { chain c { type filter hook forward priority 0; policy accept; ct state invalid drop; }; }'`,
		off: "nft delete table inet own",
	},
	{
		name: "nft, PREROUTING alone", because: "netfilter hooks",
		on:  `nft 'table inet own { chain c { type filter hook prerouting priority 0; policy accept; }; }'`,
		off: "nft delete table inet own",
	},
	{
		name: "nft, POSTROUTING alone, with AppArmor's priority", because: "netfilter hooks",
		on:  `nft 'table inet own { chain c { type filter hook postrouting priority -225; policy accept; }; }'`,
		off: "nft delete table inet own",
	},
	{
		name: "iptables-nft", because: "netfilter hooks",
		on: "iptables-nft -A FORWARD -m conntrack --ctstate INVALID -j DROP\n" +
			"ip6tables-nft -A FORWARD -m conntrack --ctstate INVALID -j DROP",
		off: "nft flush ruleset",
	},
	{
		name: "services by nft", because: "netfilter hooks",
		on: `nft 'table inet kube { chain services { type nat hook prerouting priority -100; policy accept;
			ip daddr 172.30.0.1 tcp dport 80 dnat ip to 10.88.0.3; ip6 daddr fd00:30::1 tcp dport 80 dnat ip6 to fd00:88::3; };
			chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop; }; }'`,
		off: "nft delete table inet kube",
	},
	{
		name: "services by iptables-nft", because: "netfilter hooks",
		on: "iptables-nft -t nat -A PREROUTING -d 172.30.0.1 -p tcp -j DNAT --to-destination 10.88.0.3\n" +
			"ip6tables-nft -t nat -A PREROUTING -d fd00:30::1 -p tcp -j DNAT --to-destination fd00:88::3\n" +
			"iptables-nft -A FORWARD -m conntrack --ctstate INVALID -j DROP\n" +
			"ip6tables-nft -A FORWARD -m conntrack --ctstate INVALID -j DROP",
		off: "nft flush ruleset",
	},
	{
		name: "IPsec", because: "IPsec policies",
		on:  "ip xfrm policy add src 192.168.77.0/24 dst 192.168.78.0/24 dir out action allow",
		off: "ip xfrm policy flush",
	},
	{
		name: "netdev ingress", because: "a netdev chain at " + testenv.UplinkName, outside: true,
		on:  `nft 'table netdev own { chain c { type filter hook ingress device ` + testenv.UplinkName + ` priority 0; policy accept; }; }'`,
		off: "nft delete table netdev own",
	},
	{
		name: "netdev egress", because: "a netdev chain at " + testenv.UplinkName, outside: true,
		on:  `nft 'table netdev own { chain c { type filter hook egress device ` + testenv.UplinkName + ` priority 0; policy accept; }; }'`,
		off: "nft delete table netdev own",
	},
	{
		// IPVS for IPv6 leaves a hook that assembles fragments.
		name: "services by IPVS", because: "netfilter hooks", feature: testenv.IPVS, stays: true,
		on: "ipvsadm -A -t 172.30.0.1:80\nipvsadm -a -t 172.30.0.1:80 -r 10.88.0.3:80 -m\n" +
			"ipvsadm -A -t [fd00:30::1]:80\nipvsadm -a -t [fd00:30::1]:80 -r [fd00:88::3]:80 -m",
		off: "ipvsadm -C",
	},
	{
		// A legacy table keeps its hooks until its module or its network namespace ends, also without rules.
		name: "legacy iptables", because: "netfilter hooks", feature: testenv.LegacyTables, stays: true,
		on: "iptables-legacy -A FORWARD -m conntrack --ctstate INVALID -j DROP\n" +
			"ip6tables-legacy -A FORWARD -m conntrack --ctstate INVALID -j DROP",
		off: "iptables-legacy -F\nip6tables-legacy -F",
	},
}

func (row hookRow) require(t *testing.T) {
	t.Helper()
	if row.feature.Name != "" {
		testenv.Require(t, row.feature)
	}
}

// newAutoNetwork makes a network with fastPath auto.
func newAutoNetwork(t *testing.T) *network {
	t.Helper()
	testenv.Require(t, testenv.VisibleHooks)
	return newNetworkWith(t, autoConflist)
}

func (n *network) sh(t *testing.T, commands string) {
	t.Helper()
	_, err := n.node().Run(testenv.Context(t), "sh", "-ec", commands)
	testenv.Must(t, err)
}

// stackForwards returns the number of packets that the node's stack has forwarded, without a hook that counts them.
func (n *network) stackForwards(t *testing.T, f testenv.Family) int {
	t.Helper()
	if f.Name == "IPv6" {
		return kernelCount(t, n.node(), "snmp6", "", "Ip6OutForwDatagrams")
	}
	return kernelCount(t, n.node(), "snmp", "Ip", "ForwDatagrams")
}

// forwardsOf returns how many packets of a few requests the stack has forwarded.
func (n *network) forwardsOf(t *testing.T, f testenv.Family, client *testenv.Client, server *testenv.Namespace) int {
	t.Helper()
	before := n.stackForwards(t, f)
	for range 4 {
		ask(t, client, server)
	}
	return n.stackForwards(t, f) - before
}

// eventuallyForwards waits until the stack forwards packets of a connection, or none.
func (n *network) eventuallyForwards(t *testing.T, f testenv.Family, client *testenv.Client, server *testenv.Namespace, want bool) {
	t.Helper()
	testenv.Eventually(t, fmt.Sprintf("the stack to forward packets of %s: %v", client.Local(), want), func() error {
		if count := n.forwardsOf(t, f, client, server); (count > 0) != want {
			return fmt.Errorf("it has forwarded %d", count)
		}
		return nil
	})
}

// eventuallyBypasses waits until a new connection bypasses the stack with its first packet.
func (n *network) eventuallyBypasses(t *testing.T, f testenv.Family, protocol string, p path) {
	t.Helper()
	testenv.Eventually(t, "new connections to bypass the stack", func() error {
		before := n.stackForwards(t, f)
		reach(t, p.client, protocol, p.dial, p.server)
		if count := n.stackForwards(t, f) - before; count > 0 {
			return fmt.Errorf("it has forwarded %d packets", count)
		}
		return nil
	})
}

// A firewall that is switched on sees all connections, new and running ones. Then they are offloaded, and conntrack
// knows them. When it is switched off, they bypass the stack again.
func TestFastPathAuto(t *testing.T) {
	var rows []hookRow
	for _, row := range hookRows {
		if row.stays {
			for _, f := range testenv.Families {
				t.Run(row.name+" alone, "+f.Name, func(t *testing.T) {
					newAutoNetwork(t).wantAllHooksSeen(t, []hookRow{row}, f)
				})
			}
			continue
		}
		rows = append(rows, row)
	}
	newAutoNetwork(t).wantAllHooksSeen(t, rows, testenv.Families...)
}

// Hooks for bridges count where a bridge is an uplink.
func TestFastPathAutoBridge(t *testing.T) {
	bridge := testenv.UplinkKinds[0]
	n := newAutoNetwork(t)
	testenv.Require(t, bridge.Feature)
	row := hookRow{
		name: "nft", because: "netfilter hooks for bridges at " + n.MoveUplink(t, bridge), outside: true,
		on:  `nft 'table bridge own { chain c { type filter hook forward priority 0; policy accept; }; }'`,
		off: "nft delete table bridge own",
	}
	if testenv.BridgeNetfilter.Probe() == nil { // it has hooks wherever a bridge is, also for each family
		row.present, row.outside, row.because = true, false, "netfilter hooks, "+row.because
	}
	n.wantAllHooksSeen(t, []hookRow{row}, testenv.Families...)
}

func (n *network) wantAllHooksSeen(t *testing.T, rows []hookRow, families ...testenv.Family) {
	t.Helper()
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	for _, f := range families {
		var running []runningConnection
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
			serve(t, n.Outside, protocol, at(f.Outside, 80))
			for _, p := range n.forwardedPaths(f, a, web) {
				client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
				t.Cleanup(func() { client.Close() })
				running = append(running, runningConnection{p.path, protocol, client})
			}
		}
		for _, row := range rows {
			t.Run(f.Name+"/"+row.name, func(t *testing.T) {
				row.require(t)
				n.wantHooksSeen(t, f, row, running)
			})
		}
	}
}

type runningConnection struct {
	path
	protocol string
	client   *testenv.Client
}

func (n *network) wantHooksSeen(t *testing.T, f testenv.Family, row hookRow, running []runningConnection) {
	t.Helper()
	for _, c := range running {
		if row.present {
			break
		}
		n.eventuallyBypasses(t, f, c.protocol, c.path)
		n.eventuallyForwards(t, f, c.client, c.server, false)
	}
	n.sh(t, row.on)
	defer n.sh(t, row.off)
	for _, c := range running {
		if row.outside && c.name == "pod to pod" {
			n.eventuallyBypasses(t, f, c.protocol, c.path)
			continue
		}
		n.eventuallyForwards(t, f, c.client, c.server, true)
	}
	for _, c := range running {
		n.eventuallyForwards(t, f, c.client, c.server, false)
		if row.outside && c.name == "pod to pod" { // other connections' last packets count, too
			n.eventuallyBypasses(t, f, c.protocol, c.path)
			continue
		}
		before := n.stackForwards(t, f)
		reach(t, c.path.client, c.protocol, c.dial, c.server)
		if n.stackForwards(t, f) == before {
			t.Errorf("%s by %s: a new connection bypassed the stack", c.name, c.protocol)
		}
	}
	if out := n.ctl(t, "status"); !strings.Contains(out, "established for "+f.Name+" ("+row.because+")") {
		t.Errorf("status does not say that auto acts as established because of %s: %s", row.because, out)
	}
}

// Hooks of another network namespace do not count.
func TestFastPathAutoElsewhere(t *testing.T) {
	n := newAutoNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	for _, ns := range []*testenv.Namespace{n.Outside, a.Namespace, web.Namespace} {
		_, err := ns.Run(testenv.Context(t), "nft", "add table inet own; add chain inet own c { type filter hook forward priority 0; }")
		testenv.Must(t, err)
	}
	n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
		f := testenv.Families[0]
		if p.listen.Addr().Is6() {
			f = testenv.Families[1]
		}
		serve(t, p.server, protocol, p.listen)
		n.eventuallyBypasses(t, f, protocol, p.path)
	})
	if out := n.ctl(t, "status"); !strings.Contains(out, "auto acts as always for IPv4, always for IPv6") {
		t.Errorf("status does not say that auto acts as always: %s", out)
	}
}

// tc programs of others at the uplink see each connection.
func TestFastPathAutoForeignPrograms(t *testing.T) {
	n := newAutoNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	hooks := attachForeign(t, n, testenv.UplinkName, link.Tail(), "after ours")
	n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
		serve(t, p.server, protocol, p.listen)
		if p.name != "pod to pod" {
			wantSeen(t, hooks, func() { reach(t, p.client, protocol, p.dial, p.server) })
		}
	})
	if out := n.ctl(t, "status"); !strings.Contains(out, "established for IPv4 (tc programs of others at "+testenv.UplinkName+")") {
		t.Errorf("status does not name the programs of others: %s", out)
	}
}

// What an IPsec policy wants encrypted does not leave in clear text, although the connection is older.
func TestFastPathAutoIPsec(t *testing.T) {
	n := newAutoNetwork(t)
	a := n.AddPod(t, "a", nil)
	secrets := &network{&testenv.Topology{Node: n.Outside}, nil} // whose nft counts
	secrets.nft(t, `table inet count { counter forwarded { }
		chain input { type filter hook input priority 0; policy accept; udp dport 80 counter name forwarded; } }`)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		secret, other := at(f.Outside, 80), at(f.Outside, 81)
		serve(t, n.Outside, "udp", secret)
		serve(t, n.Outside, "udp", other)
		client := connect(t, a.Namespace, "udp", netip.AddrPort{}, secret)
		defer client.Close()
		n.eventuallyForwards(t, f, client, n.Outside, false)
		conn, err := a.Dial(testenv.Context(t), "udp", secret)
		testenv.Must(t, err)
		defer conn.Close()
		leaks := func(packets int) int {
			before := secrets.forwarded(t)
			for range packets {
				_, err := conn.Write([]byte("1 secret\n"))
				testenv.Must(t, err)
				reach(t, a.Namespace, "udp", other, n.Outside) // later on the same way
			}
			testenv.DrainBacklog(t)
			return secrets.forwarded(t) - before
		}
		testenv.Must(t, testenv.WithoutBacklogDrops(t, func(int) error {
			if got := leaks(20); got != 20 {
				return fmt.Errorf("without a policy, %d of 20 packets arrive", got)
			}
			return nil
		}))
		n.sh(t, fmt.Sprintf("ip xfrm policy add src %s dst %s proto udp dport 80 dir out tmpl src %s dst %s proto esp mode tunnel",
			f.Pod(a), f.Outside, f.Node, f.Outside))
		defer n.sh(t, "ip xfrm policy flush")
		testenv.Eventually(t, "the policy to hold", func() error {
			if count := leaks(20); count > 0 {
				return fmt.Errorf("%d packets have left in clear text", count)
			}
			return nil
		})
	})
}

// An established TCP connection bypasses an IPsec policy that is younger, until repair returns it to the stack. A rule that drops
// invalid packets does not end it.
func TestFastPathAutoIPsecBesideFirewall(t *testing.T) {
	n := newAutoNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.sh(t, hookRows[0].on)
	n.sh(t, "ip xfrm policy add src 192.0.2.77 dst 192.0.2.1 dir in action allow")
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.forwardedPaths(f, a, web) {
			t.Run(p.name, func(t *testing.T) {
				serve(t, p.server, "tcp", p.listen)
				client := connect(t, p.client, "tcp", netip.AddrPort{}, p.dial)
				defer client.Close()
				n.eventuallyForwards(t, f, client, p.server, false)
				if out := n.ctl(t, "repair"); !strings.Contains(out, "TCP connections, which pass the stack's IPsec policies again") {
					t.Errorf("repair does not return the connection to the stack: %s", out)
				}
				if count := n.forwardsOf(t, f, client, p.server); count == 0 {
					t.Error("the connection does not pass the stack")
				}
				n.eventuallyForwards(t, f, client, p.server, false)
			})
		}
	})
}
