package scenario

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// quoted is a packet that a hostile pod has not received, but sends errors about.
type quoted struct {
	name     string
	src, dst netip.AddrPort
	to       netip.Addr // invalid: the packet's source, as it should be
}

// icmpError is a kind of error.
type icmpError struct {
	typ, code uint8
	rest      uint32
}

// icmpErrors are port unreachable, packet too big, and time exceeded.
var icmpErrors = map[string][]icmpError{
	"IPv4": {{3, 3, 0}, {3, 4, 600}, {11, 0, 0}},
	"IPv6": {{1, 4, 0}, {2, 0, 600}, {3, 0, 0}},
}

func isICMPError(p testenv.Packet) bool {
	switch p.Proto {
	case unix.IPPROTO_ICMP:
		return slices.Contains([]uint8{3, 11, 12}, p.Type)
	case unix.IPPROTO_ICMPV6:
		return p.Type >= 1 && p.Type <= 4
	}
	return false
}

// errorsAbout returns errors of each kind about the packets, with src as their sender.
func errorsAbout(t *testing.T, f testenv.Family, protocol string, src netip.Addr, quotes []quoted) (packets []testenv.Packet) {
	t.Helper()
	for _, q := range quotes {
		quote := testenv.UDPPacket(q.src, q.dst, "x")
		if protocol == "tcp" {
			quote = testenv.TCPPacket(q.src, q.dst, testenv.ACK, "x")
		}
		for _, kind := range icmpErrors[f.Name] {
			p, err := testenv.ICMPErrorPacket(src, quote.MustBuild(), kind.typ, kind.code, kind.rest, 0)
			if err != nil {
				t.Fatalf("%s: %v", q.name, err)
			}
			if q.to.IsValid() {
				p.Dst = q.to
			}
			packets = append(packets, p)
		}
	}
	return packets
}

// witness is a place where errors would arrive.
type witness struct {
	name     string
	received func(*testing.T) []testenv.Packet
}

// witnesses listen in the pods and outside, and on the node to what its stack accepts.
func (n *network) witnesses(t *testing.T, f testenv.Family, pods ...*testenv.Pod) (all []witness) {
	t.Helper()
	for _, pod := range pods {
		all = append(all, witness{pod.Name, openCapture(t, pod.Namespace, testenv.PodIfName).received})
	}
	all = append(all, witness{"the outside", openCapture(t, n.Outside, testenv.UplinkName).received})
	number := unix.IPPROTO_ICMP
	if !f.Is4() {
		number = unix.IPPROTO_ICMPV6
	}
	node := openRaw(t, n.node(), f.Node, number)
	return append(all, witness{"the node", func(t *testing.T) (packets []testenv.Packet) {
		for {
			payload, from, err := node.receive(1000) // a microsecond
			if errors.Is(err, errNothing) {
				return packets
			}
			if err != nil {
				t.Fatal(err)
			}
			const header = 8
			packets = append(packets, testenv.Packet{
				Src: from, Proto: uint8(number), Type: payload[0], Code: payload[1], Payload: payload[header:],
			})
		}
	}})
}

// wantNoErrors wants no error at any witness, after pings that come later.
func (n *network) wantNoErrors(t *testing.T, f testenv.Family, all []witness, pods ...*testenv.Pod) {
	t.Helper()
	for _, pod := range pods {
		ping(t, n.node(), f.Pod(pod))
	}
	ping(t, n.node(), f.Outside)
	for _, w := range all {
		about, pings := map[string]bool{}, 0
		for _, p := range w.received(t) {
			if !isICMPError(p) {
				pings++
				continue
			}
			quote, _ := testenv.DecodeIP([]byte(p.Payload))
			about[fmt.Sprintf("%s to %s", at(quote.Src, quote.SrcPort), at(quote.Dst, quote.DstPort))] = true
		}
		if len(about) > 0 {
			t.Errorf("%s: got errors about %v, want none", w.name, slices.Sorted(maps.Keys(about)))
		}
		if pings == 0 {
			t.Errorf("%s: got no ping after the errors", w.name)
		}
	}
}

// asking is an open connection, and the server that answers.
type asking struct {
	client *testenv.Client
	server *testenv.Namespace
}

// A pod sends errors about connections of others, from its own address: to pods, to the host, and to the
// outside. Nobody receives any.
func TestErrorsAboutOthers(t *testing.T) {
	for _, policy := range []string{"open", "isolated"} {
		t.Run(policy, func(t *testing.T) {
			n := newNetwork(t)
			a, web, bad := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "bad", nil)
			n.ctl(t, "set", "pods/a", "ingressPolicy="+policy)
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
				serve(t, n.Outside, protocol, at(f.Outside, 80))
				var all []asking
				open := func(from *testenv.Namespace, to netip.AddrPort, server *testenv.Namespace) (own, seen netip.AddrPort) {
					client := connect(t, from, protocol, netip.AddrPort{}, to)
					t.Cleanup(func() { client.Close() })
					all = append(all, asking{client, server})
					return client.Local(), ask(t, client, server)
				}
				outside, onWeb, hostPort := at(f.Outside, 80), at(f.Pod(web), 80), at(f.Node, 8080)
				out, masq := open(a.Namespace, outside, n.Outside)
				direct, _ := open(a.Namespace, onWeb, web.Namespace)
				hairpin, behind := open(a.Namespace, hostPort, web.Namespace)
				_, local := open(n.node(), at(f.Loopbacks[0], 8080), web.Namespace)
				node, _ := open(n.node(), outside, n.Outside)
				in, _ := open(n.Outside, hostPort, web.Namespace)

				quotes := []quoted{
					{name: "of a pod to the outside", src: out, dst: outside},
					{name: "of a pod to a pod", src: direct, dst: onWeb},
					{name: "of a pod to its client", src: onWeb, dst: direct},
					{name: "of a pod to a host port", src: hairpin, dst: hostPort},
					{name: "of a pod behind the gateway", src: behind, dst: onWeb},
					{name: "of the node behind the gateway", src: local, dst: onWeb},
					{name: "of the node", src: node, dst: outside},
					{name: "of the outside to a host port", src: in, dst: hostPort},
					{name: "of the outside to a pod", src: in, dst: onWeb},
					{name: "of the outside to the node's port", src: outside, dst: masq},
					{name: "of the outside to a masqueraded pod", src: outside, dst: out},
					{name: "of the outside to the node", src: outside, dst: node},
					{name: "of a pod, to the outside", src: out, dst: outside, to: f.Outside},
					{name: "of a masqueraded pod, to another", src: masq, dst: outside, to: f.Pod(a)},
					{name: "of no connection", src: at(f.Outside, 5555), dst: at(f.Pod(bad), 5555)},
				}
				if policy == "isolated" { // else it is the sender's own affair
					quotes = append(quotes, quoted{name: "never sent", src: at(f.Pod(a), 4444), dst: at(f.Pod(bad), 4444)})
				}
				witnesses := n.witnesses(t, f, a, web)
				wireOf(t, bad).send(t, errorsAbout(t, f, protocol, f.Pod(bad), quotes)...)
				n.wantNoErrors(t, f, witnesses, a, web)
				for _, c := range all {
					ask(t, c.client, c.server)
				}
			})
		})
	}
}

// A pod with a host port says that packets of its clients on this host are too big. That must not slow down what
// others on the host send to the same address, which is one of the host's own.
func TestErrorsLowerNoLocalPathMTU(t *testing.T) {
	const mtu = 1280 // the least that IPv6 accepts

	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		serve(t, web.Namespace, "udp", at(f.Pod(web), 80))
		for _, client := range []struct {
			from *testenv.Namespace
			addr netip.Addr
		}{{n.node(), f.Loopbacks[0]}, {n.node(), f.Node}, {a.Namespace, f.Node}} {
			c := connect(t, client.from, "udp", netip.AddrPort{}, at(client.addr, 8080))
			defer c.Close()
			about := quoted{name: "its own", src: ask(t, c, web.Namespace), dst: at(f.Pod(web), 80)}
			tooBig := errorsAbout(t, f, "udp", f.Pod(web), []quoted{about})[1]
			tooBig.Rest = mtu
			wireOf(t, web).send(t, tooBig)
			ping(t, n.node(), f.Pod(web)) // comes after it
			route, err := client.from.Run(testenv.Context(t), "ip", "route", "get", client.addr.String())
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(route, fmt.Sprintf("mtu %d", mtu)) {
				t.Errorf("%s to %s: the kernel uses an MTU of %d: %s", client.from.Name, client.addr, mtu, route)
			}
		}
	})
}
