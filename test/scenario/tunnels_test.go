package scenario

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const vni = 7

// A pod's packet in VXLAN for the node would come out of the node's tunnel, under any address and past
// the ingress policy. antiSpoof drops it.
func TestTunnelsOfTheNode(t *testing.T) {
	testenv.Require(t, testenv.VXLAN)
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "antiSpoof": false`))
	router := n.AddPod(t, "router", nil)
	if err := n.SetNetwork([]byte(withKeys(`"ipMasq": true, "ingressPolicy": "isolated"`))); err != nil {
		t.Fatal(err)
	}
	hostile, victim := n.AddPod(t, "hostile", nil), n.AddPod(t, "victim", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, port := range []uint16{4789, 8472} {
			t.Run(strconv.Itoa(int(port)), func(t *testing.T) {
				device := n.addTunnel(t, f, port)
				received := listenPacket(t, victim.Namespace, at(f.Pod(victim), 7000))
				send := func(pod *testenv.Pod, payload string) {
					t.Helper()
					frame := n.inTunnel(t, f, pod, at(f.Node, port), device, at(f.Far, 5000), at(f.Pod(victim), 7000), payload)
					if err := pod.SendFrames(testenv.PodIfName, frame); err != nil {
						t.Fatal(err)
					}
				}
				const reason = maps.Reason(bpf.ReasonTunnel)
				before := n.dropsOf(t, hostile)[reason]
				send(hostile, "hostile")
				send(router, "from a router") // may do so, and shows that the tunnel works
				if got, from := receiveFrom(t, received); got != "from a router" || from != at(f.Far, 5000) {
					t.Errorf("got %q from %s, want the router's from %s", got, from, at(f.Far, 5000))
				}
				within(t, "the drop of the hostile packet", func() error { // it may come after the router's
					if got := n.dropsOf(t, hostile)[reason]; got != before+1 {
						return fmt.Errorf("drops for %q: got %d, want %d", reason, got, before+1)
					}
					return nil
				})
			})
		}
	})
}

// addTunnel adds a VXLAN device to the node, as another engine does.
func (n *network) addTunnel(t *testing.T, f testenv.Family, port uint16) (device string) {
	t.Helper()
	const name = "vxlan7"
	n.ip(t, "link", "add", name, "type", "vxlan", "id", strconv.Itoa(vni), "local", f.Node.String(), "dstport", strconv.Itoa(int(port)))
	n.ip(t, "link", "set", name, "up")
	t.Cleanup(func() { n.ip(t, "link", "del", name) })
	return name
}

// inTunnel returns the frame of a pod with a datagram in VXLAN.
func (n *network) inTunnel(t *testing.T, f testenv.Family, pod *testenv.Pod, node netip.AddrPort, device string, from, to netip.AddrPort, payload string) []byte {
	t.Helper()
	inner := testenv.UDPPacket(from, to, payload)
	inner.SrcMAC, inner.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 9}, n.node().MACOf(t, device)
	header := binary.BigEndian.AppendUint32([]byte{8, 0, 0, 0}, vni<<8)
	outer := testenv.UDPPacket(at(f.Pod(pod), 5000), node, string(header)+string(inner.MustBuild()))
	outer.SrcMAC, outer.DstMAC = pod.MACOf(t, testenv.PodIfName), hostMACOf(t, pod)
	return outer.MustBuild()
}

// ip runs the command on the node.
func (n *network) ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := n.node().Run(testenv.Context(t), "ip", args...); err != nil {
		t.Fatalf("ip %v: %v: %s", args, err, out)
	}
}
