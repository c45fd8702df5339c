package scenario

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Packets to addresses of the pods' subnet that no pod has: their senders get an ICMP error at once, and none leaves the
// node, not even back to a router that has a route to the subnet.

const closedPort = 80 // of all addresses

func TestUnassignedAddresses(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newRoutedNetwork(t, conflist)
		pod, gone := n.AddPod(t, "a", nil), n.AddPod(t, "gone", nil)
		for _, f := range testenv.Families { // as a router
			testenv.Must(t, n.Outside.SetSysctl(f.Forwarding, "1"))
		}
		addrs := map[*testenv.Pod]map[string]netip.Addr{pod: {}, gone: {}}
		forEachFamily(t, func(_ *testing.T, f testenv.Family) {
			addrs[pod][f.Name], addrs[gone][f.Name] = f.Pod(pod), f.Pod(gone)
		})
		n.limitErrorsLess(t)
		serveThenDelete(t, pod.Namespace, gone)
		leaving := openCapture(t, n.Outside, testenv.UplinkName)
		for _, from := range []*testenv.Namespace{pod.Namespace, n.node(), n.Outside} {
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				for _, to := range []netip.Addr{addrs[gone][f.Name], sibling(f.Gateway, 99)} {
					wantUnreachable(t, from, to)
				}
			})
		}
		n.wantNoneLeft(t, pod, leaving)

		del(t, pod) // the last one
		forEachFamily(t, func(t *testing.T, f testenv.Family) { wantUnreachable(t, n.Outside, addrs[pod][f.Name]) })
		n.wantNoneLeft(t, nil, leaving)
	})
}

// limitErrorsLess leaves one of the kernel's limits for ICMP errors about missing routes: one per second. Both together let
// none pass while a sender continues.
func (n *network) limitErrorsLess(t *testing.T) {
	t.Helper()
	for _, name := range []string{"net/ipv4/icmp_ratelimit", "net/ipv6/icmp/ratelimit"} {
		testenv.Must(t, n.node().SetSysctl(name, "0"))
	}
}

// serveThenDelete deletes a pod that has open connections, which may bypass the stack.
func serveThenDelete(t *testing.T, from *testenv.Namespace, gone *testenv.Pod) {
	t.Helper()
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		client := connect(t, from, protocol, netip.AddrPort{}, serve(t, gone.Namespace, protocol, at(f.Pod(gone), closedPort)))
		t.Cleanup(func() { client.Close() })
		askOften(t, client, gone.Namespace)
	})
	del(t, gone)
}

// wantUnreachable wants an ICMP error for TCP and for UDP.
func wantUnreachable(t *testing.T, from *testenv.Namespace, to netip.Addr) {
	t.Helper()
	isUnreachable := func(err error) bool {
		return errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
	}
	if _, err := testenv.Ask(testenv.Context(t), from, "tcp", at(to, closedPort), "hello"); !isUnreachable(err) {
		t.Errorf("connect to %s from %s: %v, want that it is unreachable", to, from.Name, err)
	}
	replies := openCapture(t, from, testenv.UplinkName) // a pod's interface has the same name
	socket := listenPacket(t, from, at(testenv.Unspecified(to), 0))
	within(t, "an ICMP error about UDP to "+to.String(), func() error { // the kernel limits their rate
		if _, err := socket.WriteToUDPAddrPort([]byte("hello"), at(to, closedPort)); isUnreachable(err) {
			return nil
		}
		if !slices.ContainsFunc(replies.received(t), isICMPError) {
			return errNothing
		}
		return nil
	})
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

// wantNoneLeft wants that none of the packets has left the node.
func (n *network) wantNoneLeft(t *testing.T, pod *testenv.Pod, leaving *capture) {
	t.Helper()
	if pod != nil { // later packets
		forEachFamily(t, func(t *testing.T, f testenv.Family) { ping(t, pod.Namespace, f.Outside) })
	}
	for _, p := range leaving.received(t) {
		if (p.Proto == unix.IPPROTO_TCP || p.Proto == unix.IPPROTO_UDP) && p.DstPort == closedPort {
			t.Errorf("a packet has left the node: %s", p)
		}
	}
}

// A network that has only a part of its subnet refuses nothing else, because another host may have the rest.
func TestAddressesBesideRange(t *testing.T) {
	conflist := strings.NewReplacer(`"10.88.0.0/24"`, `"10.88.0.0/24", "rangeStart": "10.88.0.10", "rangeEnd": "10.88.0.99"`,
		`"fd00:88::/64"`, `"fd00:88::/64", "rangeStart": "fd00:88::10", "rangeEnd": "fd00:88::99"`).Replace(podsConflist)
	n := newNetworkWith(t, conflist)
	pod := n.AddPod(t, "a", nil)
	n.limitErrorsLess(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		wantUnreachable(t, pod.Namespace, sibling(f.Gateway, 0x55))
		beside := sibling(f.Gateway, 0xaa)
		addLoopback(t, n.Outside, beside)
		serve(t, n.Outside, "tcp", at(beside, closedPort))
		reachAsNode(t, pod.Namespace, "tcp", at(beside, closedPort), n.Outside, f.Node)
	})
}
