package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// forwarded counts the packets that the node's stack forwards.
const forwarded = `table inet count { counter forwarded { }
	chain forward { type filter hook forward priority -200; policy accept; counter name forwarded } }`

func (n *network) forwarded(t *testing.T) int {
	t.Helper()
	out, err := n.node().Run(testenv.Context(t), "nft", "list counter inet count forwarded")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(out), "packets ")
	count, err := strconv.Atoi(strings.Fields(text)[0])
	if err != nil {
		t.Fatalf("nft says %s: %v", out, err)
	}
	return count
}

// way is one of those that fastPath is about.
type way struct {
	name             string
	from             *testenv.Namespace
	to               netip.AddrPort // what the client asks for
	server           *testenv.Namespace
	listen           netip.AddrPort
	client, expected netip.Addr // the client, and what the server sees
}

func (n *network) ways(f family, a, web *testenv.Pod) []way {
	return []way{
		{"pod to pod", a.Namespace, at(f.pod(web), 80), web.Namespace, at(f.pod(web), 80), f.pod(a), f.pod(a)},
		{"pod to outside", a.Namespace, at(f.outside, 80), n.Outside, at(f.outside, 80), f.pod(a), f.node},
		{"outside to host port", n.Outside, at(f.node, 8080), web.Namespace, at(f.pod(web), 80), f.outside, f.outside},
	}
}

// byEachWay tells a story for each way of connections, family and protocol.
func (n *network) byEachWay(t *testing.T, a, web *testenv.Pod, story func(t *testing.T, f family, protocol string, w way)) {
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		for _, w := range n.ways(f, a, web) {
			t.Run(w.name, func(t *testing.T) { story(t, f, protocol, w) })
		}
	})
}

// An open connection goes past the stack, or not, as fastPath says.
func TestFastPath(t *testing.T) {
	const questions = 50 // one packet and its answer each, at least

	for value, most := range map[string]int{"established": questions / 2, "always": questions / 2, "never": 1 << 30} {
		t.Run(value, func(t *testing.T) {
			n := newNetworkOf(t, withKeys(`"ipMasq": true, "fastPath": "`+value+`"`))
			n.nft(t, forwarded)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			n.byEachWay(t, a, web, func(t *testing.T, f family, protocol string, w way) {
				serve(t, w.server, protocol, w.listen)
				client := connect(t, w.from, protocol, netip.AddrPort{}, w.to)
				defer client.Close()
				for range 5 { // its handshake, and a bit more
					ask(t, client, w.server)
				}
				before := n.forwarded(t)
				for range questions {
					if seen := ask(t, client, w.server); seen.Addr() != w.expected {
						t.Fatalf("the server sees %s, want %s", seen, w.expected)
					}
				}
				count := n.forwarded(t) - before
				if count > most || value == "never" && count < 2*questions {
					t.Errorf("the stack forwarded %d packets of %d questions", count, questions)
				}
			})
		})
	}
}

// A network in which every connection is met by the stack first.
func newEstablishedNetwork(t *testing.T) *network {
	return newNetworkOf(t, withKeys(`"ipMasq": true, "fastPath": "established"`))
}

// A rule against forwarding holds for new connections, and those that are there go on,
// as with a flowtable.
func TestForwardRuleStopsNewConnections(t *testing.T) {
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.byEachWay(t, a, web, func(t *testing.T, f family, protocol string, w way) {
		serve(t, w.server, protocol, w.listen)
		client := connect(t, w.from, protocol, netip.AddrPort{}, w.to)
		defer client.Close()
		for range 5 {
			ask(t, client, w.server)
		}
		n.nft(t, stop)
		defer n.nft(t, "delete table inet stop")
		if protocol == "tcp" { // of UDP a packet is shown to the stack every few seconds
			ask(t, client, w.server)
		}
		n.isStopped(t, w.from, protocol, netip.AddrPort{}, w.to)
	})
}

const stop = `table inet stop { chain forward { type filter hook forward priority 0; policy accept; reject with icmpx type admin-prohibited } }`

// isStopped wants the rule's answer, and no server's.
func (n *network) isStopped(t *testing.T, from *testenv.Namespace, protocol string, local, to netip.AddrPort) {
	t.Helper()
	ctx := testenv.Context(t)
	client, err := testenv.NewClient(ctx, from, protocol, local, to)
	if err == nil {
		defer client.Close()
		var answer testenv.Reply
		if answer, err = client.Ask(ctx, "hello"); err == nil {
			t.Errorf("a rule against forwarding let %s ask %s by %s, seen as %s", from.Name, to, protocol, answer.Peer)
		}
	}
	if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s asks %s by %s: %v, want the answer of the rule against forwarding", from.Name, to, protocol, err)
	}
}

// Ports that a connection has used before give a new one no way past the rules.
func TestForwardRuleStopsTheSamePorts(t *testing.T) {
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	port := uint16(5000)
	n.byEachWay(t, a, web, func(t *testing.T, f family, protocol string, w way) {
		if protocol == "udp" {
			return // has no connections
		}
		serve(t, w.server, "tcp", w.listen)
		local := at(w.client, port)
		client := connect(t, w.from, "tcp", local, w.to)
		for range 5 {
			ask(t, client, w.server)
		}
		if err := client.Reset(); err != nil {
			t.Fatal(err)
		}
		n.nft(t, stop)
		n.isStopped(t, w.from, "tcp", local, w.to)
		n.nft(t, "delete table inet stop")
		port++
	})
}

// Rules go, and others come, in one transaction: `firewall-cmd --reload`.
func TestFirewallIsReloaded(t *testing.T) {
	n := newEstablishedNetwork(t)
	n.nft(t, reloaded)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.byEachWay(t, a, web, func(t *testing.T, f family, protocol string, w way) {
		serve(t, w.server, protocol, w.listen)
		client := connect(t, w.from, protocol, netip.AddrPort{}, w.to)
		defer client.Close()
		for _, rules := range []string{"", "flush ruleset", "flush ruleset; " + reloaded, "flush ruleset; " + reloaded} {
			n.nft(t, rules)
			for range 5 {
				ask(t, client, w.server)
			}
			reach(t, w.from, protocol, w.to, w.server)
		}
	})
}

const reloaded = `table inet firewalld { chain forward { type filter hook forward priority 10; policy drop;
	ct state established,related accept
	ct state invalid drop
	ip saddr 10.88.0.0/24 accept; ip daddr 10.88.0.0/24 accept
	ip6 saddr fd00:88::/64 accept; ip6 daddr fd00:88::/64 accept
} }`

// conntrack knows of connections that go past it, and of their end.
func TestConntrackKnowsOffloadedConnections(t *testing.T) {
	n := newEstablishedNetwork(t)
	n.nft(t, `table inet filter { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop } }`)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.byEachWay(t, a, web, func(t *testing.T, f family, protocol string, w way) {
		serve(t, w.server, protocol, w.listen)
		client := connect(t, w.from, protocol, netip.AddrPort{}, w.to)
		payload := strings.Repeat("x", 1000)
		for range 200 { // far more than a window
			if _, err := client.Ask(testenv.Context(t), payload); err != nil {
				t.Fatal(err)
			}
		}
		local := at(w.client, client.Local().Port())
		known := n.tracked(t, local)
		if known == nil {
			t.Fatalf("conntrack knows nothing of %s by %s", local, protocol)
		}
		if protocol == "udp" {
			client.Close()
			return
		}
		if state := stateOf(known); state != tcpEstablished {
			t.Errorf("conntrack has the connection in state %d, want %d", state, tcpEstablished)
		}
		client.Close()
		testenv.Eventually(t, "conntrack to see the end of "+local.String(), func() error {
			if known := n.tracked(t, local); known != nil && stateOf(known) < tcpLastACK {
				return fmt.Errorf("it is in state %d", stateOf(known))
			}
			return nil
		})
	})
}

// Of enum tcp_conntrack (linux/netfilter/nf_conntrack_tcp.h).
const (
	tcpEstablished = 3
	tcpLastACK     = 6
)

func stateOf(flow *netlink.ConntrackFlow) uint8 {
	if info, ok := flow.ProtoInfo.(*netlink.ProtoInfoTCP); ok {
		return info.State
	}
	return 0
}

// tracked is what the node's conntrack knows of the connection that a client has opened.
func (n *network) tracked(t *testing.T, client netip.AddrPort) *netlink.ConntrackFlow {
	t.Helper()
	testenv.Require(t, testenv.Conntrack)
	family := netlink.InetFamily(netlink.FAMILY_V4)
	if client.Addr().Is6() {
		family = netlink.FAMILY_V6
	}
	var found *netlink.ConntrackFlow
	err := n.node().Do(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		for _, flow := range flows {
			src, _ := netip.AddrFromSlice(flow.Forward.SrcIP)
			if at(src.Unmap(), flow.Forward.SrcPort) == client {
				found = flow
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
