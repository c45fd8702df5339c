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
	"github.com/vishvananda/netlink/nl"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// forwarded counts the packets that the node's stack forwards.
const forwarded = `table inet count { counter forwarded { }
	chain forward { type filter hook forward priority -200; policy accept; counter name forwarded } }`

func (n *network) forwarded(t *testing.T) int {
	t.Helper()
	out, err := n.node().Run(testenv.Context(t), "nft", "list counter inet count forwarded")
	testenv.Must(t, err)
	_, text, _ := strings.Cut(out, "packets ")
	count, err := strconv.Atoi(strings.Fields(text)[0])
	if err != nil {
		t.Fatalf("parse nft's counter %q: %v", out, err)
	}
	return count
}

// fastPath decides whether the packets of an open connection bypass the host's stack.
func TestFastPath(t *testing.T) {
	const requests = 50 // at least one packet each, and one for the reply

	for value, most := range map[string]int{"established": requests / 2, "always": requests / 2, "never": 1 << 30} {
		t.Run(value, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "`+value+`"`))
			n.nft(t, forwarded)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
				serve(t, p.server, protocol, p.listen)
				client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
				defer client.Close()
				for range offloadRequests {
					ask(t, client, p.server)
				}
				before := n.forwarded(t)
				for range requests {
					if seen := ask(t, client, p.server); seen.Addr() != p.seen {
						t.Fatalf("server sees %s, want %s", seen, p.seen)
					}
				}
				count := n.forwarded(t) - before
				if count > most || value == "never" && count < 2*requests {
					t.Errorf("stack forwarded %d packets of %d requests, want fastPath %s", count, requests, value)
				}
			})
		})
	}
}

// newEstablishedNetwork makes a network whose connections all start on the slow path.
func newEstablishedNetwork(t *testing.T) *network {
	return newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "established"`))
}

// A rule against forwarding rejects new connections. Established ones continue, as with a flowtable.
func TestForwardRuleRejectsNewConnections(t *testing.T) {
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
		serve(t, p.server, protocol, p.listen)
		client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
		defer client.Close()
		for range offloadRequests {
			ask(t, client, p.server)
		}
		n.nft(t, rejectForwarding)
		defer n.nft(t, "delete table inet block")
		if protocol == "tcp" { // conntrack updates of UDP would meet the rule every few seconds
			ask(t, client, p.server)
		}
		n.wantRejected(t, p.client, protocol, netip.AddrPort{}, p.dial)
	})
}

const rejectForwarding = `table inet block { chain forward { type filter hook forward priority 0; policy accept; reject with icmpx type admin-prohibited } }`

// wantRejected sends a request, and wants the rule's ICMP error.
func (n *network) wantRejected(t *testing.T, from *testenv.Namespace, protocol string, local, to netip.AddrPort) {
	t.Helper()
	ctx := testenv.Context(t)
	client, err := testenv.NewClient(ctx, from, protocol, local, to)
	if err == nil {
		defer client.Close()
		if _, err = client.Ask(ctx, "hello"); err == nil {
			t.Errorf("%s to %s by %s: got a reply, want a rejection", from.Name, to, protocol)
		}
	}
	if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%s to %s by %s: got %v, want a rejection", from.Name, to, protocol, err)
	}
}

// A new connection does not bypass the rules by reusing the ports of a former one.
func TestForwardRuleRejectsReusedPorts(t *testing.T) {
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	port := uint16(5000)
	n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
		if protocol == "udp" {
			return // a reused port continues the same UDP flow
		}
		serve(t, p.server, "tcp", p.listen)
		local := at(p.clientAddr, port)
		client := connect(t, p.client, "tcp", local, p.dial)
		for range offloadRequests {
			ask(t, client, p.server)
		}
		testenv.Must(t, client.Reset())
		n.nft(t, rejectForwarding)
		n.wantRejected(t, p.client, "tcp", local, p.dial)
		n.nft(t, "delete table inet block")
		port++
	})
}

// `firewall-cmd --reload` replaces all rules in one transaction.
func TestFirewallReload(t *testing.T) {
	for name, start := range map[string]func(*testing.T) *network{"established": newEstablishedNetwork, "auto": newAutoNetwork} {
		t.Run(name, func(t *testing.T) {
			n := start(t)
			n.nft(t, reloaded)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
				serve(t, p.server, protocol, p.listen)
				client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
				defer client.Close()
				for _, rules := range []string{"", "flush ruleset", "flush ruleset; " + reloaded, "flush ruleset; " + reloaded} {
					n.nft(t, rules)
					for range offloadRequests {
						ask(t, client, p.server)
					}
					reach(t, p.client, protocol, p.dial, p.server)
				}
			})
		})
	}
}

const reloaded = `table inet firewalld { chain forward { type filter hook forward priority 10; policy drop;
	ct state established,related accept
	ct state invalid drop
	ip saddr 10.88.0.0/24 accept; ip daddr 10.88.0.0/24 accept
	ip6 saddr fd00:88::/64 accept; ip6 daddr fd00:88::/64 accept
} }`

// conntrack follows offloaded connections until they close.
func TestConntrackFollowsOffloadedConnections(t *testing.T) {
	n := newEstablishedNetwork(t)
	n.nft(t, `table inet filter { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop } }`)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.forEachForwardedPath(t, a, web, func(t *testing.T, protocol string, p forwardedPath) {
		serve(t, p.server, protocol, p.listen)
		client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
		payload := strings.Repeat("x", 1000)
		for range 200 { // exceeds the TCP window
			if _, err := client.Ask(testenv.Context(t), payload); err != nil {
				t.Fatal(err)
			}
		}
		local := at(p.clientAddr, client.Local().Port())
		known := n.tracked(t, local)
		if known == nil {
			t.Fatalf("conntrack has no entry for %s by %s", local, protocol)
		}
		if protocol == "udp" {
			client.Close()
			return
		}
		if state := stateOf(known); state != tcpEstablished {
			t.Errorf("conntrack state: got %d, want %d", state, tcpEstablished)
		}
		client.Close()
		testenv.Eventually(t, "conntrack to see the end of "+local.String(), func() error {
			if known := n.tracked(t, local); known != nil && stateOf(known) < tcpLastACK {
				return fmt.Errorf("state: got %d, want at least %d", stateOf(known), tcpLastACK)
			}
			return nil
		})
	})
}

// From enum tcp_conntrack (linux/netfilter/nf_conntrack_tcp.h).
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

// tracked returns the node's conntrack entry for the connection that a client has opened, or nil.
func (n *network) tracked(t *testing.T, client netip.AddrPort) *netlink.ConntrackFlow {
	t.Helper()
	testenv.Require(t, testenv.Conntrack)
	var found *netlink.ConntrackFlow
	err := n.node().Do(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.InetFamily(nl.GetIPFamily(client.Addr().AsSlice())))
		for _, flow := range flows {
			src, _ := netip.AddrFromSlice(flow.Forward.SrcIP)
			if at(src.Unmap(), flow.Forward.SrcPort) == client {
				found = flow
			}
		}
		return err
	})
	testenv.Must(t, err)
	return found
}
