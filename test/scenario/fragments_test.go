package scenario

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// largeDatagram is one of 60 kB, no part of which looks like another.
func largeDatagram(tag string) string {
	var text strings.Builder
	for text.Len() < 60_000 {
		text.WriteString(tag)
		text.WriteByte(byte(text.Len()))
		text.WriteByte(byte(text.Len() >> 8))
	}
	return text.String()[:60_000]
}

// end is a socket for datagrams, and how frames are put on its wire.
type end struct {
	*net.UDPConn
	ns      *testenv.Namespace
	nextHop testenv.MAC
}

// sendFragments sends datagrams in fragments that order has arranged, past the stack of the end.
func (e end) sendFragments(t *testing.T, from, to netip.AddrPort, id uint32, order func(...[][]byte) [][]byte, payloads ...string) {
	t.Helper()
	const size = 1448 // fits into an MTU of 1,500 in both families
	var datagrams [][][]byte
	for _, payload := range payloads {
		packet := testenv.UDPPacket(from, to, payload)
		packet.SrcMAC, packet.DstMAC = e.ns.MACOf(t, testenv.PodIfName), e.nextHop
		fragments, err := testenv.Fragment(packet.MustBuild(), size, id)
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

// orders are those in which the fragments of datagrams may come.
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
	for i := range datagrams[0] {
		for _, fragments := range datagrams {
			all = append(all, fragments[i])
		}
	}
	return all
}

// Datagrams of 60 kB pass in fragments of any order, through masquerading and host ports and back.
func TestLargeDatagrams(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", mapBoth(8080, 80))
	id := uint32(7)
	inEachFamily(t, func(t *testing.T, f family) {
		outside := end{listenPacket(t, n.Outside, at(f.outside, 7000)), n.Outside, n.node().MACOf(t, testenv.UplinkName)}
		client := end{listenPacket(t, pod.Namespace, at(f.pod(pod), 5000)), pod.Namespace, hostMACOf(t, pod)}
		server := end{listenPacket(t, pod.Namespace, at(f.pod(pod), 80)), pod.Namespace, client.nextHop}

		// By the kernel's own sockets, which also tells what the outside knows the pod as.
		large := largeDatagram("socket")
		sendTo(t, client.UDPConn, at(f.outside, 7000), large)
		got, masqueraded := receiveFrom(t, outside.UDPConn)
		if got != large || masqueraded.Addr() != f.node {
			t.Fatalf("the outside got %d bytes from %s, want %d from %s", len(got), masqueraded, len(large), f.node)
		}
		sendTo(t, outside.UDPConn, at(f.node, 8080), large)
		if got, from := receiveFrom(t, server.UDPConn); got != large || from != at(f.outside, 7000) {
			t.Fatalf("the host port got %d bytes from %s, want %d from %s", len(got), from, len(large), at(f.outside, 7000))
		}

		for _, tc := range []struct {
			name               string
			from, to           end
			source, dest, seen netip.AddrPort
		}{
			{"masqueraded", client, outside, at(f.pod(pod), 5000), at(f.outside, 7000), masqueraded},
			{"back to the pod", outside, client, at(f.outside, 7000), masqueraded, at(f.outside, 7000)},
			{"to the host port", outside, server, at(f.outside, 7000), at(f.node, 8080), at(f.outside, 7000)},
			{"back from the host port", server, outside, at(f.pod(pod), 80), at(f.outside, 7000), at(f.node, 8080)},
		} {
			for name, order := range orders {
				t.Run(tc.name+" "+name, func(t *testing.T) {
					payloads := []string{largeDatagram("one"), largeDatagram("other")}
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

// hostMACOf is the address of the host's end of a pod's veth, as ADD has told it.
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
	t.Fatal("the result names no device of the host")
	return testenv.MAC{}
}
