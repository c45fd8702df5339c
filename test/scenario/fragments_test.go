package scenario

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

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
	if err != nil {
		t.Fatal(err)
	}
	var forced error
	err = raw.Control(func(fd uintptr) {
		forced = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20)
	})
	if err := errors.Join(err, forced); err != nil {
		t.Fatal(err)
	}
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

// hostMACOf returns the MAC address of the host's end of a pod's veth, from ADD's result.
func hostMACOf(t *testing.T, pod *testenv.Pod) testenv.MAC {
	t.Helper()
	for _, device := range pod.Result.Interfaces {
		if device.Sandbox == "" {
			mac, err := net.ParseMAC(device.Mac)
			if err != nil {
				t.Fatal(err)
			}
			return testenv.MAC(mac)
		}
	}
	t.Fatalf("interfaces in the result: got %v, want one on the host", pod.Result.Interfaces)
	return testenv.MAC{}
}
