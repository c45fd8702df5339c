package scenario

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Resets and ends with guessed numbers, from a second uplink and from the right one, do not make the port of a quiet
// connection free for other pods, who want every port towards that remote.
func TestSpoofedResetsFreeNoPort(t *testing.T) {
	n := newNetwork(t)
	n.fewPorts(t)
	spoofers := append(n.spoofers(t), spoofer{
		"the uplink", n.Outside, testenv.UplinkName, n.node().MACOf(t, testenv.UplinkName),
		map[string]netip.Addr{"IPv4": testenv.OutsideAddr4, "IPv6": testenv.OutsideAddr6},
		map[string]netip.Addr{"IPv4": testenv.NodeAddr4, "IPv6": testenv.NodeAddr6},
	})
	a := n.AddPod(t, "a", nil)
	var others []*testenv.Pod
	for _, id := range []string{"b", "c", "d"} {
		others = append(others, n.AddPod(t, id, nil))
	}
	ports := n.countMasqPorts(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := at(f.Outside, 80)
		quiet := pairs{openPair(t, "tcp", path{"pod to outside", a.Namespace, n.Outside, server, server})}
		for range offloadRequests {
			quiet.exchange(t)
		}
		dropSYNs(t, n.Outside)
		seen := quiet[0].seen()
		for _, s := range spoofers {
			s.send(t, n, f, spoofed("tcp", server, seen))
		}
		for _, pod := range others {
			packet := testenv.TCPPacket(at(f.Pod(pod), 1), server, testenv.SYN, "")
			packet.SrcMAC, packet.DstMAC = pod.MACOf(t, testenv.PodIfName), hostMACOf(t, pod)
			var frames [][]byte
			for i := range 2 * ports {
				packet.SrcPort = uint16(2000 + i)
				frames = append(frames, packet.MustBuild())
			}
			if err := pod.SendFrames(testenv.PodIfName, frames...); err != nil {
				t.Fatal(err)
			}
		}
		used := 0
		for _, count := range n.portsInUse(t, server) {
			used += count
		}
		if used < ports*95/100 {
			t.Errorf("ports in use: got %d of %d, want at least 95 %%", used, ports)
		}
		quiet.exchange(t)
		if after := quiet[0].seen(); after != seen {
			t.Errorf("server sees %s, want %s as before", after, seen)
		}
	})
}

// dropSYNs keeps a host from replying to what opens a connection.
func dropSYNs(t *testing.T, ns *testenv.Namespace) {
	t.Helper()
	requireTool(t, "nft", "nftables")
	const rules = "table inet quiet { chain in { type filter hook prerouting priority -300; policy accept; tcp flags & (syn | ack) == syn drop; }; }"
	if _, err := ns.Run(testenv.Context(t), "nft", rules); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := ns.Run(testenv.Context(t), "nft", "delete table inet quiet"); err != nil {
			t.Error(err)
		}
	})
}
