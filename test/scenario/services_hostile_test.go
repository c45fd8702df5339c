package scenario

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Hostile packets beside connections to a service, offloaded or ended. Each one gets where the stack alone delivers it.

// hostRules translate connections to web.
type hostRules struct {
	name    string
	table   string // of nftables
	set     func(n *network, t *testing.T, f testenv.Family, web *testenv.Pod)
	addr    func(f testenv.Family) netip.AddrPort
	outside bool // where the client is, not in a
}

func rulesOfService() hostRules {
	set := func(n *network, t *testing.T, f testenv.Family, web *testenv.Pod) { n.service(t, f, f.Pod(web)) }
	return hostRules{"service", "kube", set, func(f testenv.Family) netip.AddrPort { return at(serviceAddrs[f.Name], 80) }, false}
}

func rulesOfNodePort(name string, masquerade bool) hostRules {
	set := func(n *network, t *testing.T, f testenv.Family, web *testenv.Pod) { n.nodePort(t, f, web, masquerade) }
	return hostRules{name, "nodeport", set, func(f testenv.Family) netip.AddrPort { return at(f.Node, nodePort) }, true}
}

// besideService is a network with a connection to web, from a or the outside, that the host's rules translate; x is a third pod.
type besideService struct {
	*network
	hostRules
	f          testenv.Family
	protocol   string
	a, web, x  *testenv.Pod
	client     netip.AddrPort
	seen       netip.AddrPort  // the client, for web
	seq        map[bool]uint32 // of TCP: the next numbers, true for the client's
	captures   map[string]*capture
	names      map[netip.Addr]string
	deliveries map[string][]string // of each attack: receivers and packets
}

// Ports of the client, and of a connection that does not exist.
const clientPort, freePort = 5000, 6000

// tuples returns the tuples of the connection, before and after translation, and of replies without a connection.
func (b *besideService) tuples() map[string][2]netip.AddrPort {
	service, backend, own := b.addr(b.f), at(b.f.Pod(b.web), 80), at(b.f.Pod(b.x), 80)
	free := at(b.client.Addr(), freePort)
	return map[string][2]netip.AddrPort{
		"service to client": {service, b.client}, "backend to client": {backend, b.client},
		"client to service": {b.client, service}, "client to backend": {b.client, backend},
		"service to free port": {service, free}, "backend to free port": {backend, free},
		"third to client": {own, b.client}, "third to free port": {own, free},
		// Again, after conntrack has believed a RST, if web sees the client itself.
		"seen client to backend": {b.seen, backend}, "backend to seen client": {backend, b.seen},
	}
}

// hostilePackets returns packets with each tuple, and ICMP errors of source that quote them. A payload ends with the name.
func (b *besideService) hostilePackets(t *testing.T, name string, source netip.Addr) (all []testenv.Packet) {
	t.Helper()
	const mtu = 1300
	types := map[string][2]uint8{"unreachable": {3, 3}, "too big": {3, 4}}
	if source.Is6() {
		types = map[string][2]uint8{"unreachable": {1, 4}, "too big": {2, 0}}
	}
	tuples := b.tuples()
	for _, tuple := range slices.Sorted(maps.Keys(tuples)) {
		from, to := tuples[tuple][0], tuples[tuple][1]
		packet := testenv.UDPPacket(from, to, attackPayload+name+tuple)
		own := from.Addr() == source && slices.Contains([]string{"backend to client", "backend to seen client", "client to service"}, tuple)
		switch {
		case b.protocol == "udp":
			all = append(all, packet)
		case own && (strings.HasPrefix(name, "offloaded") || source == b.client.Addr()): // ends send and end what they like, as without translation
		default:
			all = append(all, b.segments(name+tuple, from, to)...)
		}
		if b.protocol == "tcp" {
			packet = testenv.TCPPacket(from, to, testenv.ACK, "")
		}
		for kind, e := range types {
			packet.Payload = attackPayload + name + kind + " about " + tuple
			p, err := testenv.ICMPErrorPacket(source, packet.MustBuild(), e[0], e[1], mtu, 0)
			testenv.Must(t, err)
			all = append(all, p)
		}
	}
	return all
}

// segments returns TCP packets with numbers that are not in the connection's window.
func (b *besideService) segments(name string, from, to netip.AddrPort) (all []testenv.Packet) {
	for _, flags := range []uint8{testenv.ACK, testenv.RST, testenv.SYN} {
		for i, distance := range []string{"ahead", "behind"} {
			if flags == testenv.SYN && (to == at(b.f.Pod(b.web), 80) || distance == "behind") {
				continue // the server's answer has a random number
			}
			p := testenv.TCPPacket(from, to, flags, fmt.Sprintf("%s%s, flags %d %s", attackPayload, name, flags, distance))
			p.Seq, p.Ack = b.seq[from.Addr() == b.client.Addr()]+1<<30*uint32(1+2*i), b.seq[from.Addr() != b.client.Addr()]
			if b.outside {
				p.Ack += 1 << 30 // what conntrack finds invalid reaches the node, whose RST would have this number
			}
			all = append(all, p)
		}
	}
	return all
}

// attack has each pod and the outside send all of them, and records who gets which.
func (b *besideService) attack(t *testing.T, phase string) {
	t.Helper()
	for _, attacker := range []struct {
		name string
		wire
		own, pings netip.Addr
	}{
		{"x", wireOf(t, b.x), b.f.Pod(b.x), b.f.Pod(b.a)}, {"web", wireOf(t, b.web), b.f.Pod(b.web), b.f.Pod(b.a)},
		{"a", wireOf(t, b.a), b.f.Pod(b.a), b.f.Pod(b.web)}, {"outside", b.outsideWire(t), b.f.Outside, b.f.Node},
	} {
		var packets []testenv.Packet
		for _, p := range b.hostilePackets(t, phase+", "+attacker.name+": ", attacker.own) {
			packets = append(packets, slices.Repeat([]testenv.Packet{p}, offloadAfter+2)...) // so that deliveries count for the offload
		}
		// The reply to the ping comes after all.
		attacker.send(t, append(packets, testenv.EchoPacket(attacker.own, attacker.pings, false, 1, 1, legalPayload))...)
		b.record(t, attacker.name)
	}
}

// offloadAfter is OFFLOAD_AFTER of offload.h.
const offloadAfter = 8

// record records who has received the attacker's packets. Replies, which have other payloads or protocols, are left out.
func (b *besideService) record(t *testing.T, attacker string) {
	t.Helper()
	answered := false
	testenv.Eventually(t, "the reply to the ping of "+attacker, func() error {
		last := answered // the captures then have all that came before the reply
		for receiver, c := range b.captures {
			for _, p := range c.received(t) {
				answered = answered || (receiver == attacker && p.Payload == legalPayload)
				_, name, hostile := strings.Cut(p.Payload, attackPayload)
				if hostile && (isICMPError(p) || p.SrcPort > 0) && isICMPError(p) == strings.Contains(name, " about ") {
					b.deliveries[name] = append(b.deliveries[name], receiver+" gets "+b.describe(t, p, strings.Contains(name, "free port")))
				}
			}
		}
		if !last {
			return errNothing
		}
		return nil
	})
}

// describe returns what matters of a packet, with names of the addresses and ports. If the packet was not sent to the free port,
// conntrack may have chosen that at random.
func (b *besideService) describe(t *testing.T, p testenv.Packet, toFree bool) string {
	t.Helper()
	side := func(addr netip.Addr, port uint16) string {
		if addr != b.f.Node && (port == 80 || port == clientPort || port == freePort && toFree) {
			return fmt.Sprintf("%s:%d", b.names[addr], port)
		}
		return b.names[addr] + ":another" // chosen at random, if the tuple is in use
	}
	if !isICMPError(p) {
		return fmt.Sprintf("%s > %s, flags %d", side(p.Src, p.SrcPort), side(p.Dst, p.DstPort), p.TCPFlags)
	}
	quoted, err := testenv.DecodeIP([]byte(p.Payload))
	testenv.Must(t, err)
	return fmt.Sprintf("%s > %s, type %d, code %d, MTU %d, about %s", b.names[p.Src], b.names[p.Dst],
		p.Type, p.Code, p.Rest, b.describe(t, quoted, toFree))
}

// newBesideService opens the connection and uses it until it is offloaded, if it may be.
func newBesideService(t *testing.T, n *network, rules hostRules, fastPath string, f testenv.Family, protocol string, a, web, x *testenv.Pod) (*besideService, *testenv.Client) {
	t.Helper()
	b := &besideService{
		network: n, hostRules: rules, f: f, protocol: protocol, a: a, web: web, x: x, deliveries: map[string][]string{},
		captures: map[string]*capture{"outside": openCapture(t, n.Outside, testenv.UplinkName)},
		names:    map[netip.Addr]string{serviceAddrs[f.Name]: "service", f.Outside: "outside", f.Node: "node", f.Gateway: "gateway"},
	}
	for name, pod := range map[string]*testenv.Pod{"a": a, "web": web, "x": x} {
		b.captures[name], b.names[f.Pod(pod)] = openCapture(t, pod.Namespace, testenv.PodIfName), name
		ping(t, pod.Namespace, f.Outside) // the node learns its neighbors
	}
	rules.set(n, t, f, web) // loads conntrack
	testenv.Must(t, n.node().SetSysctl("net/netfilter/nf_conntrack_tcp_loose", "1"))
	serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
	opener := a.Namespace
	b.client = at(f.Pod(a), clientPort)
	if rules.outside {
		opener, b.client = n.Outside, at(f.Outside, clientPort)
	}
	client := connect(t, opener, protocol, b.client, rules.addr(f))
	ask(t, client, web.Namespace)
	if fastPath != "never" {
		n.eventuallyOffloads(t, f, client, web.Namespace)
	}
	b.seq = map[bool]uint32{}
	for _, p := range b.captures["web"].received(t) {
		if p.DstPort == 80 {
			b.seen = at(p.Src, p.SrcPort)
			b.seq[true], b.seq[false] = p.Seq+uint32(len(p.Payload)), p.Ack
		}
	}
	return b, client
}

// What others send with the tuples of a connection that the host's rules translate, or about them, gets where the stack delivers
// it: while the connection is offloaded, after conntrack has forgotten it, and after the rules are gone. It does not end the
// connection.
func TestHostileBesideServices(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	for _, tc := range []struct {
		rules     hostRules
		antiSpoof bool
	}{
		{rulesOfService(), true}, {rulesOfService(), false},
		{rulesOfNodePort("node port", false), false}, {rulesOfNodePort("masqueraded node port", true), false},
	} {
		t.Run(fmt.Sprint(tc.rules.name, ", antiSpoof ", tc.antiSpoof), func(t *testing.T) {
			byStack := besideServices(t, tc.rules, "never", tc.antiSpoof)
			all := besideServices(t, tc.rules, "established", tc.antiSpoof)
			for name := range all {
				byStack[name] = append(byStack[name], []string{}...) // also what the stack alone delivers to nobody
			}
			for name, want := range byStack {
				without := func(from, these []string) []string {
					return slices.DeleteFunc(slices.Clone(from), func(s string) bool { return slices.Contains(these, s) })
				}
				more, less := without(all[name], want), without(want, all[name])
				if strings.Contains(name, "flags") {
					less = nil // conntrack does not know the connection's numbers
				}
				if len(more)+len(less) > 0 {
					t.Errorf("%s: got %q, want as by the stack %q", name, all[name], want)
				}
			}
		})
	}
}

// besideServices returns the deliveries of all attacks.
func besideServices(t *testing.T, rules hostRules, fastPath string, antiSpoof bool) map[string][]string {
	t.Helper()
	n := newNetworkWith(t, withKeys(fmt.Sprintf(`"ipMasq": true, "fastPath": "%s", "antiSpoof": %v`, fastPath, antiSpoof)))
	a, web, x := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "x", nil)
	all := map[string][]string{}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		b, client := newBesideService(t, n, rules, fastPath, f, protocol, a, web, x)
		b.attack(t, "offloaded")
		within(t, "the connection to work", func() error { // after what the socket has got
			ctx, cancel := context.WithTimeout(testenv.Context(t), time.Second)
			defer cancel()
			_, err := client.Ask(ctx, "hello")
			return err
		})
		if fastPath != "never" && !t.Failed() {
			n.eventuallyOffloads(t, f, client, web.Namespace)
		}
		testenv.Must(t, n.node().SetSysctl("net/netfilter/nf_conntrack_tcp_loose", "0")) // the client's late ACKs open no connection
		n.flush(t)
		n.newGeneration(t)
		b.attack(t, "forgotten")
		n.nft(t, "delete table "+map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name]+" "+rules.table)
		n.flush(t)
		n.newGeneration(t)
		b.attack(t, "gone")
		testenv.Must(t, client.Reset())
		for name, deliveries := range b.deliveries {
			if rules.outside && protocol == "udp" {
				deliveries = unmasqueraded(deliveries)
			}
			slices.Sort(deliveries)
			all[f.Name+", "+protocol+", "+name] = slices.Compact(deliveries)
		}
	})
	return all
}

// unmasqueraded replaces the node's address by web's, for which it stands: the attacks have web and the outside open connections
// with one tuple, and the plugin masquerades web's only.
func unmasqueraded(deliveries []string) (all []string) {
	for _, d := range deliveries {
		all = append(all, strings.NewReplacer("gets node:another > outside:5000", "gets web:80 > outside:5000",
			"gets node > outside", "gets web > outside", "about outside:5000 > node:another", "about outside:5000 > web:80").Replace(d))
	}
	return all
}

// A forged SYN with the tuple of an offloaded connection does not end it, whether it seems to be from the client or the service.
func TestForgedSYNBesideServices(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "established", "antiSpoof": false`))
	a, web, x := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "x", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		for sender, w := range map[string]wire{"a pod": wireOf(t, x), "the outside": n.outsideWire(t)} {
			for _, tuple := range []string{"client to service", "service to client", "client to backend", "backend to client"} {
				t.Run(tuple+" of "+sender, func(t *testing.T) {
					client := connect(t, a.Namespace, "tcp", netip.AddrPort{}, at(serviceAddrs[f.Name], 80))
					defer client.Close()
					n.eventuallyOffloads(t, f, client, web.Namespace)
					b := besideService{network: n, hostRules: rulesOfService(), f: f, a: a, web: web, x: x, client: client.Local()}
					w.send(t, testenv.TCPPacket(b.tuples()[tuple][0], b.tuples()[tuple][1], testenv.SYN, ""))
					ping(t, w.ns, f.Node) // comes after it
					n.newGeneration(t)
					n.eventuallyOffloads(t, f, client, web.Namespace)
				})
			}
		}
	})
}

// Both ends of an offloaded connection vanish, unseen by conntrack. The port's next connection begins in the stack.
func TestVanishedServiceConnection(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	run := func(pod *testenv.Pod, name string, args ...string) {
		t.Helper()
		_, err := pod.Namespace.Run(testenv.Context(t), name, args...)
		testenv.Must(t, err)
	}
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		client := connect(t, a.Namespace, "tcp", netip.AddrPort{}, at(serviceAddrs[f.Name], 80))
		n.eventuallyOffloads(t, f, client, web.Namespace)
		for _, pod := range []*testenv.Pod{a, web} {
			run(pod, "nft", "table inet silent { chain c { type filter hook output priority 0; tcp flags rst drop; }; }")
		}
		testenv.Must(t, client.Reset())
		run(web, "ss", "-K", "state", "established", "sport = :80")
		for _, pod := range []*testenv.Pod{a, web} {
			run(pod, "nft", "delete table inet silent")
		}
		next := connect(t, a.Namespace, "tcp", client.Local(), at(serviceAddrs[f.Name], 80))
		defer next.Close()
		if n.forwardsOf(t, f, next, web.Namespace) == 0 {
			t.Error("it bypasses the stack from its beginning")
		}
		n.eventuallyOffloads(t, f, next, web.Namespace)
	})
}

// The port of an offloaded connection's client is used again: after the service is gone, for its backend's own address, and
// after the service has moved. Packets reach what the rules say, and nobody else.
func TestReusedPortsOfServices(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web, other := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "other", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		service, backend := at(serviceAddrs[f.Name], 80), at(f.Pod(web), 80)
		table := map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name] + " kube"
		if protocol == "tcp" { // what no rule translates goes to the outside
			_, err := n.Outside.Run(testenv.Context(t), "ip", "addr", "add", serviceAddrs[f.Name].String(), "dev", "lo", "nodad")
			testenv.Must(t, err)
		}
		serve(t, n.Outside, protocol, service)
		for _, pod := range []*testenv.Pod{web, other} {
			serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
		}
		captures := map[*testenv.Namespace]*capture{}
		for _, pod := range []*testenv.Pod{web, other} {
			captures[pod.Namespace] = openCapture(t, pod.Namespace, testenv.PodIfName)
		}
		for _, row := range []struct {
			name   string
			rules  func()
			port   uint16
			dial   netip.AddrPort
			server *testenv.Namespace
		}{
			{"the service", func() { n.service(t, f, f.Pod(web)) }, clientPort + 0, service, web.Namespace},
			{"the service is gone", func() { n.nft(t, "delete table "+table) }, clientPort + 0, service, n.Outside},
			{"the service", func() { n.service(t, f, f.Pod(web)) }, clientPort + 1, service, web.Namespace},
			{"its backend", func() { n.nft(t, "delete table "+table) }, clientPort + 1, backend, web.Namespace},
			{"the service", func() { n.service(t, f, f.Pod(web)) }, clientPort + 2, service, web.Namespace},
			{"the service has moved", func() { n.service(t, f, f.Pod(other)) }, clientPort + 2, service, other.Namespace},
		} {
			row.rules()
			n.flush(t)
			n.newGeneration(t)
			for _, c := range captures {
				c.received(t)
			}
			local := at(f.Pod(a), row.port)
			client := connect(t, a.Namespace, protocol, local, row.dial)
			for range testenv.OffloadRequests {
				if seen := ask(t, client, row.server); row.server != n.Outside && seen != local {
					t.Errorf("%s: the server sees %s, want %s", row.name, seen, local)
				}
			}
			testenv.Must(t, client.Reset())
			for ns, c := range captures {
				if got := c.received(t); ns != row.server && slices.ContainsFunc(got, func(p testenv.Packet) bool { return p.Src == local.Addr() }) {
					t.Errorf("%s: %s has got packets: %v", row.name, ns.Name, got)
				}
			}
		}
	})
}

// The kernel uses the memory of conntrack entries again. So what a flow remembers as its entry may be that of another
// connection of the pod to the same service.
func TestReusedEntriesOfServices(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, "udp", at(f.Pod(web), 80))
		open := func(count int) (clients []*testenv.Client) {
			for range count {
				client := connect(t, a.Namespace, "udp", netip.AddrPort{}, at(serviceAddrs[f.Name], 80))
				t.Cleanup(func() { client.Close() })
				askOften(t, client, web.Namespace)
				clients = append(clients, client)
			}
			return clients
		}
		forgotten := open(16)
		n.flush(t)
		open(128)
		for _, client := range forgotten {
			if seen := ask(t, client, web.Namespace); seen != client.Local() {
				t.Errorf("the server sees %s, want %s", seen, client.Local())
			}
		}
	})
}

// A pod opens many connections to a service. Those of another pod by a service keep their translation while they are quiet.
func TestFloodOfService(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newNetworkWith(t, withKeys(smallestTable))
	a, web, x, target := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "x", nil), n.AddPod(t, "target", nil)
	var quiet pairs
	for _, f := range testenv.Families {
		n.service(t, f, f.Pod(web))
		family := map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name]
		for _, protocol := range []string{"tcp", "udp"} {
			n.nft(t, fmt.Sprintf("add rule %[1]s kube services %[1]s daddr %s %s dport 81 dnat to %s", family, serviceAddrs[f.Name], protocol, at(f.Pod(target), 80)))
			quiet = append(quiet, openPair(t, protocol, path{"service", a.Namespace, web.Namespace, at(f.Pod(web), 80), at(serviceAddrs[f.Name], 80)}))
		}
	}
	quiet.settle(t)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		var received func() int64
		if protocol == "udp" {
			received = replyToAll(t, target.Namespace, at(f.Pod(target), 80))
		} else {
			serve(t, target.Namespace, "tcp", at(f.Pod(target), 80))
		}
		w, packet := wireOf(t, x), newFloodPacket(protocol, at(f.Pod(x), 1), at(serviceAddrs[f.Name], 81))
		packet.SrcMAC, packet.DstMAC = w.mac, w.next
		passes := runtime.NumCPU()*offloadAfter + 2 // each CPU counts for itself
		stream{x.Namespace, testenv.PodIfName, packet, func(p *testenv.Packet, flow int) { p.SrcPort = manyPort(flow) }, received, passes}.run(t)
		if out := n.ctl(t, "flows", "--port", "81", "-o", "json", "x"); protocol == "udp" && !strings.Contains(out, `"translatedByHost": true`) {
			t.Errorf("no connection of the flood is offloaded: %.2000s", out)
		}
		wantQuiet(t, quiet)
	})
}

// Conntrack gives forged packets with the tuple of an offloaded connection behind a node port another port, and the server resets
// these connections. One reset of 4,096 has the tag of the offloaded connection by chance. It does not end that.
func TestResetsWithChanceTags(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	web := n.AddPod(t, "web", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.nodePort(t, f, web, false)
		server, from := at(f.Pod(web), 80), at(f.Outside, clientPort)
		serve(t, web.Namespace, "tcp", server)
		client := connect(t, n.Outside, "tcp", from, at(f.Node, nodePort))
		n.eventuallyOffloads(t, f, client, web.Namespace)
		testenv.Must(t, n.node().SetSysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "0")) // each one gets a new port
		forged := testenv.TCPPacket(from, server, testenv.ACK, "")
		w := n.outsideWire(t)
		for range 200 { // 20,000 resets: about five have the tag
			w.send(t, slices.Repeat([]testenv.Packet{forged}, 100)...)
			ask(t, client, web.Namespace)
		}
	})
}
