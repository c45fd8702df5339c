package scenario

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
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
				askOften(t, client, p.server)
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
		askOften(t, client, p.server)
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
		askOften(t, client, p.server)
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
				for range 4 { // both CPUs have decisions from before the reload
					client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
					defer client.Close()
					for _, rules := range []string{"", "flush ruleset", "flush ruleset; " + reloaded, "flush ruleset; " + reloaded} {
						n.nft(t, rules)
						askOften(t, client, p.server)
						reach(t, p.client, protocol, p.dial, p.server)
					}
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
	n.nft(t, dropInvalid)
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

// conntrack keeps a quiet connection as long as nf_conntrack_tcp_timeout_established says: from the beginning of the
// offload, and from each conntrack update, which no receiver sees.
func TestConntrackKeepsQuietConnections(t *testing.T) {
	for name, rules := range map[string]string{"": "", "with rules": `, "policy": {"ingress": [{}], "egress": [{}]}`} {
		t.Run(name, func(t *testing.T) { testQuietConnections(t, rules) })
	}
}

func testQuietConnections(t *testing.T, rules string) {
	n := newNetworkWith(t, withKeys(smallestTable+rules)) // a small table is read often
	n.nft(t, dropInvalid)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	ends := []*testenv.Namespace{a.Namespace, web.Namespace, n.Outside}
	for _, end := range ends {
		nft(t, end, updatesReceived)
	}
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.forwardedPaths(f, a, web) {
			for name, use := range usesBeforeQuiet {
				t.Run(p.name+" "+name, func(t *testing.T) {
					client, server, opener := n.offloadQuiet(t, p, use)
					for _, from := range []net.Conn{client, server} {
						for range conntrackRetransmissions + 2 {
							timeout := n.setEstablishedTimeout(t)
							n.makeUpdatesDue(t)
							to := map[net.Conn]net.Conn{client: server, server: client}[from]
							send(t, from, to, "x")
							n.wantKept(t, opener, timeout)
						}
					}
				})
			}
		}
	})
	for _, end := range ends {
		if out := nft(t, end, "list counter inet updates received"); !strings.Contains(out, "packets 0 ") {
			t.Errorf("%s received conntrack updates: %s", end.Name, out)
		}
	}
}

// conntrack sees that either end resets an offloaded connection.
func TestConntrackSeesResets(t *testing.T) {
	n := newEstablishedNetwork(t)
	n.nft(t, dropInvalid)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.forwardedPaths(f, a, web) {
			for i, by := range []string{"client", "server"} {
				t.Run(p.name+" by the "+by, func(t *testing.T) {
					client, server := connectPair(t, p.path)
					opener := at(p.clientAddr, plain(client.LocalAddr()).Port())
					usesBeforeQuiet["requests"](t, client, server)
					if n.tracked(t, opener) == nil {
						t.Fatalf("conntrack has no entry for %s", opener)
					}
					end := []net.Conn{client, server}[i].(*net.TCPConn)
					testenv.Must(t, errors.Join(end.SetLinger(0), end.Close()))
					testenv.Eventually(t, "conntrack to see the reset of "+opener.String(), func() error {
						if known := n.tracked(t, opener); known != nil && stateOf(known) != tcpClose {
							return fmt.Errorf("state: got %d, want %d", stateOf(known), tcpClose)
						}
						return nil
					})
				})
			}
		}
	})
}

// updatesReceived counts packets with reserved bits in the TCP header, which only conntrack updates have.
const updatesReceived = `table inet updates { counter received { }
	chain input { type filter hook input priority 0; policy accept; @th,100,3 != 0 counter name received
} }`

// conntrackRetransmissions is the default of nf_conntrack_tcp_max_retrans: so many equal packets have a shorter timeout.
const conntrackRetransmissions = 3

// usesBeforeQuiet begin the offload of a connection, and end with data of one side or the other.
var usesBeforeQuiet = map[string]func(t *testing.T, client, server net.Conn){
	"requests": func(t *testing.T, client, server net.Conn) {
		for range testenv.OffloadRequests {
			send(t, client, server, "request")
			send(t, server, client, "reply")
		}
	},
	"messages of the client": func(t *testing.T, client, server net.Conn) {
		for range 2 * testenv.OffloadRequests {
			send(t, client, server, "message")
		}
	},
	"messages of the server": func(t *testing.T, client, server net.Conn) {
		for range 2 * testenv.OffloadRequests {
			send(t, server, client, "message")
		}
	},
	"an upload":  func(t *testing.T, client, server net.Conn) { send(t, client, server, strings.Repeat("x", mebibyte)) },
	"a download": func(t *testing.T, client, server net.Conn) { send(t, server, client, strings.Repeat("x", mebibyte)) },
}

// send sends text, and returns when it is received.
func send(t *testing.T, from, to net.Conn, text string) {
	t.Helper()
	sent := make(chan error, 1)
	go func() {
		_, err := io.WriteString(from, text)
		sent <- err
	}()
	testenv.Must(t, to.SetReadDeadline(time.Now().Add(testenv.Timeout)))
	_, err := io.ReadFull(to, make([]byte, len(text)))
	if err = errors.Join(err, <-sent); err != nil {
		t.Fatal(err)
	}
}

// setEstablishedTimeout gives conntrack another timeout, in seconds, by which what it has seen since is recognized.
func (n *network) setEstablishedTimeout(t *testing.T) int {
	t.Helper()
	const name = "net/netfilter/nf_conntrack_tcp_timeout_established"
	before, err := n.node().Sysctl(name)
	testenv.Must(t, err)
	timeout, err := strconv.Atoi(before)
	testenv.Must(t, err)
	timeout += 1000
	testenv.Must(t, n.node().SetSysctl(name, strconv.Itoa(timeout)))
	return timeout
}

// offloadQuiet opens a connection, which conntrack keeps when it is quiet.
func (n *network) offloadQuiet(t *testing.T, p forwardedPath, use func(*testing.T, net.Conn, net.Conn)) (client, server net.Conn, opener netip.AddrPort) {
	t.Helper()
	client, server = connectPair(t, p.path)
	opener = at(p.clientAddr, plain(client.LocalAddr()).Port())
	timeout := n.setEstablishedTimeout(t)
	use(t, client, server)
	n.wantKept(t, opener, timeout)
	return client, server, opener
}

// makeUpdatesDue has conntrack miss an update of each connection, and each next packet decided in full.
func (n *network) makeUpdatesDue(t *testing.T) {
	t.Helper()
	n.age(t, bpf.FlowOffload) // where struct offload has ct_seen
	n.newGeneration(t)
}

// age makes the TCP flows of a kind an hour older.
func (n *network) age(t *testing.T, kind bpf.FlowKind) {
	t.Helper()
	n.changeFlows(t, kind, func(e *bpf.FlowEntry) { e.Flow.LastSeen -= 3600 })
}

// changeFlows changes the TCP flows of a kind.
func (n *network) changeFlows(t *testing.T, kind bpf.FlowKind, change func(*bpf.FlowEntry)) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		all := make([]bpf.FlowEntry, datapath.FlowTable.MaxEntries())
		var cursor ebpf.MapBatchCursor
		_, err := datapath.FlowTable.BatchLookup(&cursor, make([]uint32, len(all)), all, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) { // the end
			t.Fatal(err)
		}
		for place, entry := range all {
			if entry.Key.Kind != kind || maps.Protocol(entry.Key.Protocol) != maps.TCP {
				continue
			}
			testenv.Must(t, datapath.FlowTable.Lookup(uint32(place), &entry)) // the programs may have changed it meanwhile
			change(&entry)
			testenv.Must(t, datapath.FlowTable.Put(uint32(place), entry))
		}
	})
}

// newGeneration has the programs decide each next packet in full.
func (n *network) newGeneration(t *testing.T) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		testenv.Must(t, maps.With(testenv.Context(t), datapath, func(store *maps.Store) error {
			store.NewGeneration()
			return nil
		}))
	})
}

// wantKept waits until conntrack keeps the client's connection for timeout seconds from now.
func (n *network) wantKept(t *testing.T, client netip.AddrPort, timeout int) {
	t.Helper()
	testenv.Eventually(t, "conntrack to keep the connection of "+client.String(), func() error { return n.isKept(t, client, timeout) })
}

// isKept returns an error unless conntrack keeps the client's connection for timeout seconds from now.
func (n *network) isKept(t *testing.T, client netip.AddrPort, timeout int) error {
	t.Helper()
	known := n.tracked(t, client)
	if known == nil {
		return errors.New("conntrack has no entry")
	}
	if left := int(known.TimeOut); left > timeout || left < timeout-500 {
		return fmt.Errorf("for %d s more, want %d", left, timeout)
	}
	return nil
}

// From enum tcp_conntrack (linux/netfilter/nf_conntrack_tcp.h).
const (
	tcpEstablished = 3
	tcpLastACK     = 6
	tcpClose       = 8
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
