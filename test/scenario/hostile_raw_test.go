package scenario

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// wantAt wants the payload at the one socket. The other must receive nothing.
func (s *rawSocket) wantAt(t *testing.T, payload string, not *rawSocket) {
	t.Helper()
	testenv.Eventually(t, fmt.Sprintf("%q", payload), func() error {
		if got, from, err := not.receive(time.Millisecond); !errors.Is(err, errNothing) {
			t.Fatalf("the other socket: got %q from %s (%v), want nothing", got, from, err)
		}
		got, from, err := s.receive(time.Millisecond)
		if err == nil && got != payload {
			err = fmt.Errorf("got %q from %s", got, from)
		}
		return err
	})
	if got, from, err := not.receive(time.Millisecond); !errors.Is(err, errNothing) {
		t.Fatalf("the other socket: got %q from %s (%v), want nothing", got, from, err)
	}
}

// portless are the protocols without ports that hosts speak. IPIP is another one in IPv6.
var portless = map[string]func(testenv.Family) int{
	"GRE":  func(testenv.Family) int { return unix.IPPROTO_GRE },
	"ESP":  func(testenv.Family) int { return unix.IPPROTO_ESP },
	"SCTP": func(testenv.Family) int { return unix.IPPROTO_SCTP },
	"IPIP": func(f testenv.Family) int {
		if f.Is4() {
			return unix.IPPROTO_IPIP
		}
		return unix.IPPROTO_IPV6
	},
}

// The node receives what is for it by a protocol without ports, although a pod uses the same one with the
// same remote, before the node does or afterwards.
func TestPodTakesNoPortlessRepliesOfNode(t *testing.T) {
	for name, keys := range map[string]string{
		"default":         `"ipMasq": true`,
		"tunnels of pods": `"ipMasq": true, "masqTunnels": true`,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(keys))
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				for name, number := range portless {
					for _, podFirst := range []bool{true, false} {
						t.Run(fmt.Sprintf("%s, pod first %v", name, podFirst), func(t *testing.T) {
							n.wantPortlessReplies(t, f, name, number(f), podFirst)
						})
					}
				}
			})
		})
	}
}

func (n *network) wantPortlessReplies(t *testing.T, f testenv.Family, name string, number int, podFirst bool) {
	bad := n.AddPod(t, "bad", nil)
	defer del(t, bad)
	pod := openRaw(t, bad.Namespace, f.Node, number)
	node := openRaw(t, n.node(), f.Node, number)
	outside := openRaw(t, n.Outside, f.Node, number)
	if podFirst {
		pod.sendTo(t, f.Outside, packetOf(name, "from the pod"))
	}
	for i := range 3 {
		request, reply := packetOf(name, fmt.Sprint("request ", i)), packetOf(name, fmt.Sprint("reply ", i))
		node.sendTo(t, f.Outside, request)
		testenv.Eventually(t, "the node's request", func() error {
			got, from, err := outside.receive(10 * time.Millisecond)
			if err == nil && (got != request || from != f.Node) {
				err = fmt.Errorf("got %q from %s", got, from)
			}
			return err
		})
		pod.sendTo(t, f.Outside, packetOf(name, "from the pod"))
		outside.sendTo(t, f.Node, reply)
		node.wantAt(t, reply, pod)
	}
}

// packetOf returns a packet of the protocol with a text in it: of SCTP, one within an association.
func packetOf(protocol, text string) string {
	if protocol == "SCTP" {
		return sctp(0x12345678, 0, text)
	}
	return "\x00\x00\x08\x00" + text // a GRE header, and as good as any for the others
}

// sctp returns a packet with one chunk (RFC 9260, 3).
func sctp(tag uint32, chunk byte, text string) string {
	packet := binary.BigEndian.AppendUint16(nil, 2905)
	packet = binary.BigEndian.AppendUint16(packet, 2905)
	packet = binary.BigEndian.AppendUint32(packet, tag)
	packet = append(packet, 0, 0, 0, 0, chunk, 0, 0, byte(4+len(text)))
	return string(packet) + text
}

// An association that the outside opens is the node's. Those of a pod stay its own.
func TestPodTakesNoSCTPAssociationOfNode(t *testing.T) {
	const data, init = 0, 1

	n := newNetwork(t)
	bad := n.AddPod(t, "bad", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		pod := openRaw(t, bad.Namespace, f.Node, unix.IPPROTO_SCTP)
		node := openRaw(t, n.node(), f.Node, unix.IPPROTO_SCTP)
		outside := openRaw(t, n.Outside, f.Node, unix.IPPROTO_SCTP)
		own := sctp(0x12345678, data, "for the pod")
		pod.sendTo(t, f.Outside, sctp(0, init, "the pod's"))
		outside.want(t, sctp(0, init, "the pod's"), f.Node)
		outside.sendTo(t, f.Node, own)
		pod.wantAt(t, own, node)

		for i := range 3 {
			opened := sctp(0, init, fmt.Sprint("from outside ", i))
			outside.sendTo(t, f.Node, opened)
			node.wantAt(t, opened, pod)
		}
		outside.sendTo(t, f.Node, own)
		pod.wantAt(t, own, node)
	})
}

// The node's pings are answered to the node, although a pod's have the same identifier outside.
func TestPodTakesNoEchoRepliesOfNode(t *testing.T) {
	n := newNetwork(t)
	bad := n.AddPod(t, "bad", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		number, protocol := unix.IPPROTO_ICMP, "icmp"
		if !f.Is4() {
			number, protocol = unix.IPPROTO_ICMPV6, "icmpv6"
		}
		pod := wireOf(t, bad)
		request := func(text string) testenv.Packet {
			return testenv.EchoPacket(f.Pod(bad), f.Outside, false, 1234, 1, text)
		}
		pod.send(t, request("the pod's first"))
		var flows []maps.Flow
		testenv.Eventually(t, "the pod's flow", func() error {
			flows = n.masqueraded(t, at(f.Outside, 0), protocol)
			if len(flows) != 1 {
				return fmt.Errorf("got %d flows, want 1", len(flows))
			}
			return nil
		})
		atPod, node := openCapture(t, bad.Namespace, testenv.PodIfName), openRaw(t, n.node(), f.Node, number)
		for i := range 3 {
			own := testenv.EchoPacket(f.Node, f.Outside, false, flows[0].Local.Port(), uint16(i), "the node's")
			packet, err := own.BuildIP()
			if err != nil {
				t.Fatal(err)
			}
			node.sendTo(t, f.Outside, string(packet[len(packet)-len("the node's")-8:]))
			testenv.Eventually(t, "the reply", func() error {
				for _, p := range atPod.received(t) {
					if p.Payload == "the node's" {
						t.Fatalf("the pod got the reply to the node: %s", p)
					}
				}
				got, _, err := node.receive(time.Millisecond)
				if err == nil && (len(got) < 8 || got[8:] != "the node's" || got[0] != 0 && got[0] != 129) {
					err = fmt.Errorf("got %q", got)
				}
				return err
			})
			pod.send(t, request("the pod's next"))
			atPod.until(t, "the pod's own reply", func(p testenv.Packet) bool { return p.Payload == "the pod's next" })
		}
	})
}
