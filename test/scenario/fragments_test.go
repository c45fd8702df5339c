package scenario

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strconv"
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

// end is a UDP socket, and the link on which its frames are sent.
type end struct {
	*net.UDPConn
	ns      *testenv.Namespace
	nextHop testenv.MAC
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

// cuts are sizes of fragments that fit an MTU of 1,500 in both families.
var cuts = [][]int{
	{1448},
	{1376, 72}, // cut again by a router with a smaller MTU
	{1448, 744, 1000, 560, 1304},
}

// sendFragments sends datagrams in fragments, in the given order, from a packet socket. Each datagram
// is cut in another way.
func (e end) sendFragments(t *testing.T, from, to netip.AddrPort, id uint32, order func(...[][]byte) [][]byte, payloads ...string) {
	t.Helper()
	var datagrams [][][]byte
	for i, payload := range payloads {
		packet := testenv.UDPPacket(from, to, payload)
		packet.SrcMAC, packet.DstMAC = e.ns.MACOf(t, testenv.PodIfName), e.nextHop
		fragments, err := testenv.FragmentUnevenly(packet.MustBuild(), cuts[i%len(cuts)], id)
		if err != nil {
			t.Fatal(err)
		}
		datagrams = append(datagrams, fragments)
		id++
	}
	if err := e.ns.SendFrames(testenv.PodIfName, order(datagrams...)...); err != nil {
		t.Fatal(err)
	}
}

// orders are ways to arrange the fragments of datagrams.
var orders = map[string]func(...[][]byte) [][]byte{
	"in order": func(datagrams ...[][]byte) [][]byte { return slices.Concat(datagrams...) },
	"reversed": func(datagrams ...[][]byte) [][]byte {
		all := slices.Concat(datagrams...)
		slices.Reverse(all)
		return all
	},
	"first one last": func(datagrams ...[][]byte) (all [][]byte) {
		for _, fragments := range datagrams {
			all = append(append(all, fragments[1:]...), fragments[0])
		}
		return all
	},
	"interleaved":           interleave,
	"interleaved, reversed": func(d ...[][]byte) [][]byte { all := interleave(d...); slices.Reverse(all); return all },
}

func interleave(datagrams ...[][]byte) (all [][]byte) {
	for i, left := 0, true; left; i++ {
		left = false
		for _, fragments := range datagrams {
			if i < len(fragments) {
				all, left = append(all, fragments[i]), true
			}
		}
	}
	return all
}

// Fragments of 60 kB datagrams pass masquerading and host ports in any order, in both directions.
func TestLargeDatagrams(t *testing.T) {
	n := newNetwork(t)
	pod, other := n.AddPod(t, "a", mapBoth(8080, 80)), n.AddPod(t, "b", nil)
	id := uint32(7)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		outside := end{listenLarge(t, n.Outside, at(f.Outside, 7000)), n.Outside, n.node().MACOf(t, testenv.UplinkName)}
		client := end{listenLarge(t, pod.Namespace, at(f.Pod(pod), 5000)), pod.Namespace, hostMACOf(t, pod)}
		server := end{listenLarge(t, pod.Namespace, at(f.Pod(pod), 80)), pod.Namespace, client.nextHop}
		node := end{UDPConn: listenLarge(t, n.node(), at(f.Node, 7000))}
		neighbor := end{listenLarge(t, other.Namespace, at(f.Pod(other), 5000)), other.Namespace, hostMACOf(t, other)}

		// Sockets send first, which shows the pod's masqueraded address.
		large := largeDatagram("socket")
		sendTo(t, client.UDPConn, at(f.Outside, 7000), large)
		got, masqueraded := receiveFrom(t, outside.UDPConn)
		if got != large || masqueraded.Addr() != f.Node {
			t.Fatalf("outside: got %d bytes from %s, want %d from %s", len(got), masqueraded, len(large), f.Node)
		}
		sendTo(t, outside.UDPConn, at(f.Node, 8080), large)
		if got, from := receiveFrom(t, server.UDPConn); got != large || from != at(f.Outside, 7000) {
			t.Fatalf("host port: got %d bytes from %s, want %d from %s", len(got), from, len(large), at(f.Outside, 7000))
		}
		sendTo(t, neighbor.UDPConn, at(f.Node, 8080), large)
		got, hairpin := receiveFrom(t, server.UDPConn)
		if got != large || hairpin.Addr() != f.Gateway {
			t.Fatalf("host port, from a pod: got %d bytes from %s, want %d from %s", len(got), hairpin, len(large), f.Gateway)
		}

		for _, tc := range []struct {
			name               string
			from, to           end
			source, dest, seen netip.AddrPort
		}{
			{"masqueraded", client, outside, at(f.Pod(pod), 5000), at(f.Outside, 7000), masqueraded},
			{"back to the pod", outside, client, at(f.Outside, 7000), masqueraded, at(f.Outside, 7000)},
			{"to the host port", outside, server, at(f.Outside, 7000), at(f.Node, 8080), at(f.Outside, 7000)},
			{"back from the host port", server, outside, at(f.Pod(pod), 80), at(f.Outside, 7000), at(f.Node, 8080)},
			{"to the node", outside, node, at(f.Outside, 7000), at(f.Node, 7000), at(f.Outside, 7000)},
			{"from a pod to the node", client, node, at(f.Pod(pod), 5000), at(f.Node, 7000), at(f.Pod(pod), 5000)},
			{"from a pod to the host port", neighbor, server, at(f.Pod(other), 5000), at(f.Node, 8080), hairpin},
			{"back from the host port to a pod", server, neighbor, at(f.Pod(pod), 80), hairpin, at(f.Node, 8080)},
		} {
			for name, order := range orders {
				t.Run(tc.name+" "+name, func(t *testing.T) {
					var payloads []string
					for i := range cuts {
						payloads = append(payloads, largeDatagram(strconv.Itoa(i)))
					}
					tc.from.sendFragments(t, tc.source, tc.dest, id, order, payloads...)
					id += uint32(len(payloads))
					for range payloads {
						got, from := receiveFrom(t, tc.to.UDPConn)
						if i := slices.Index(payloads, got); i < 0 || from != tc.seen {
							t.Errorf("got %d bytes from %s, want %d from %s", len(got), from, len(payloads[0]), tc.seen)
						} else {
							payloads[i] = ""
						}
					}
				})
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
