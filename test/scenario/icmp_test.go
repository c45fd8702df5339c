package scenario

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ICMP errors reach the original sender, and quote the packet as it was sent.

// Closed ports are reported in every direction that is translated.
func TestPortUnreachable(t *testing.T) {
	n := newNetwork(t)
	n.AddFar(t, 0)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		wantRefused(t, other.Namespace, protocol, at(f.Outside, 9))
		wantRefused(t, other.Namespace, protocol, at(f.Far, 9))
		wantRefused(t, n.Outside, protocol, at(f.Node, 8080))
		wantRefused(t, n.Far, protocol, at(f.Node, 8080))
		wantRefused(t, n.node(), protocol, at(f.Node, 8080))
		wantRefused(t, n.node(), protocol, at(f.Loopbacks[0], 8080))
		wantRefused(t, other.Namespace, protocol, at(f.Node, 8080))
		wantRefused(t, web.Namespace, protocol, at(f.Gateway, 8080))
	})
}

// traceroute from a pod shows every hop, and so does one from afar to a host port.
func TestTraceroute(t *testing.T) {
	requireTool(t, "traceroute", "traceroute")
	n := newNetwork(t)
	n.AddFar(t, 0)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		hops := []netip.Addr{f.Gateway, f.Outside, f.Router, f.Far}
		for _, mode := range [][]string{{}, {"-I"}, {"-T", "-p", "80"}} {
			traceroute(t, web.Namespace, f.Far, hops, mode...)
		}
		// The last hop, the pod, replies with the node's address.
		back := []netip.Addr{f.Far.Prev(), f.Router.Prev(), f.Node, f.Node}
		traceroute(t, n.Far, f.Node, back, "-T", "-p", "8080")
		traceroute(t, n.Far, f.Node, back, "-U", "-p", "8080")
	})
}

// traceroute sends one probe per hop and compares the addresses that reply.
func traceroute(t *testing.T, from *testenv.Namespace, to netip.Addr, want []netip.Addr, mode ...string) {
	t.Helper()
	args := append([]string{"-n", "-q", "1", "-N", "1", "-w", "10", "-m", "8"}, mode...)
	output, err := from.Run(testenv.Context(t), "traceroute", append(args, to.String())...)
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	var hops []netip.Addr
	for i, line := range strings.Split(strings.TrimSpace(output), "\n") {
		if fields := strings.Fields(line); i > 0 && len(fields) > 1 {
			hop, _ := netip.ParseAddr(fields[1]) // the zero Addr for "*"
			hops = append(hops, hop)
		}
	}
	if !slices.Equal(hops, want) {
		t.Errorf("traceroute %s from %s shows %v, want %v:\n%s", strings.Join(mode, " "), from.Name, hops, want, output)
	}
}

// A distant link has a smaller MTU than both ends. They learn of it only by the ICMP error of the router
// before it: without that the transfer stalls.
func TestPathMTU(t *testing.T) {
	for _, mtu := range []int{1280, 1400} {
		for _, offloads := range []bool{true, false} {
			t.Run(fmt.Sprintf("MTU %d, offloads %v", mtu, offloads), func(t *testing.T) {
				n := newNetwork(t)
				n.AddFar(t, mtu)
				a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
				if !offloads {
					n.setOffloadsOff(t, a, web)
				}
				forEachFamily(t, func(t *testing.T, f testenv.Family) {
					onWeb, onFar := at(f.Pod(web), 80), at(f.Far, 80)
					for _, send := range []transfer{upload(sizeOf(4 * mebibyte)), download(sizeOf(4 * mebibyte))} {
						send(t, a.Namespace, n.Far, onFar, onFar)
						send(t, n.Far, web.Namespace, onWeb, at(f.Node, 8080))
					}
				})
			})
		}
	}
}

// setOffloadsOff disables offloads from pods to far, so that every packet has its size on the wire.
func (n *network) setOffloadsOff(t *testing.T, pods ...*testenv.Pod) {
	t.Helper()
	set := func(ns *testenv.Namespace, device string) {
		testenv.Must(t, ns.SetOffloads(device, false))
	}
	for _, pod := range pods {
		set(pod.Namespace, testenv.PodIfName)
		set(n.node(), pod.Result.Interfaces[0].Name)
	}
	for _, ns := range []*testenv.Namespace{n.node(), n.Outside, n.Router, n.Far} {
		set(ns, testenv.UplinkName)
	}
	set(n.Outside, testenv.FarName)
	set(n.Router, testenv.FarName)
}

// largeDatagram returns a payload of 60 kB, no two parts of which are equal.
func largeDatagram(tag string) string {
	var text strings.Builder
	for text.Len() < 60_000 {
		text.WriteString(tag)
		text.WriteByte(byte(text.Len()))
		text.WriteByte(byte(text.Len() >> 8))
	}
	return text.String()[:60_000]
}

// listenLarge is listenPacket with room for some large datagrams in many fragments each.
func listenLarge(t *testing.T, ns *testenv.Namespace, addr netip.AddrPort) *net.UDPConn {
	t.Helper()
	socket := listenPacket(t, ns, addr)
	raw, err := socket.SyscallConn()
	testenv.Must(t, err)
	var forced error
	err = raw.Control(func(fd uintptr) {
		forced = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20)
	})
	testenv.Must(t, errors.Join(err, forced))
	return socket
}

// Sockets send datagrams of 60 kB, in fragments, by masquerading and by host ports, in both directions. Fragments in
// other orders are in the packet tables.
func TestLargeDatagrams(t *testing.T) {
	n := newNetwork(t)
	pod, other := n.AddPod(t, "a", mapBoth(8080, 80)), n.AddPod(t, "b", nil)
	large := largeDatagram("socket")
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		outside, client := listenLarge(t, n.Outside, at(f.Outside, 7000)), listenLarge(t, pod.Namespace, at(f.Pod(pod), 5000))
		server, neighbor := listenLarge(t, pod.Namespace, at(f.Pod(pod), 80)), listenLarge(t, other.Namespace, at(f.Pod(other), 5000))
		pass := func(from, to *net.UDPConn, dial netip.AddrPort) (seen netip.AddrPort) {
			t.Helper()
			sendTo(t, from, dial, large)
			got, seen := receiveFrom(t, to)
			if got != large {
				t.Fatalf("%s: got %d bytes from %s, want %d", dial, len(got), seen, len(large))
			}
			return seen
		}
		for _, tc := range []struct {
			client, server *net.UDPConn
			dial, seen     netip.AddrPort // seen without a port: any
		}{
			{client, outside, at(f.Outside, 7000), at(f.Node, 0)},
			{outside, server, at(f.Node, 8080), at(f.Outside, 7000)},
			{neighbor, server, at(f.Node, 8080), at(f.Gateway, 0)},
		} {
			seen := pass(tc.client, tc.server, tc.dial)
			if seen.Addr() != tc.seen.Addr() || tc.seen.Port() != 0 && seen != tc.seen {
				t.Errorf("to %s: server sees %s, want %s", tc.dial, seen, tc.seen)
			}
			if source := pass(tc.server, tc.client, seen); source != tc.dial {
				t.Errorf("back from %s: client sees %s", tc.dial, source)
			}
		}
	})
}
