package scenario

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// options are the headers of an IPv6 packet with more options than a parser reads.
var options = slices.Repeat([]byte{unix.IPPROTO_DSTOPTS}, 3)

// disguises hide what a frame is from a parser that does not read as far as the kernel.
var disguises = []struct {
	name     string
	only6    bool
	disguise func([]byte) []byte
	reason   bpf.Reason // if it is not the sender's
}{
	{name: "plain", disguise: func(f []byte) []byte { return f }},
	{name: "two tags of VLAN 0", disguise: func(f []byte) []byte { return slices.Insert(f, 12, 0x81, 0, 0, 0, 0x81, 0, 0, 0) }, reason: bpf.ReasonHeaders},
	{name: "802.1ad in VLAN 0", disguise: func(f []byte) []byte { return slices.Insert(f, 12, 0x81, 0, 0, 0, 0x88, 0xa8, 0, 0) }, reason: bpf.ReasonHeaders},
	{name: "three options", only6: true, disguise: func(f []byte) []byte { return testenv.Extended(f, options...) }},
	{name: "a routing header", only6: true, disguise: func(f []byte) []byte {
		f = testenv.Extended(f, unix.IPPROTO_ROUTING)
		f[14+40+3] = 0 // segments that are left
		return f
	}},
}

// A host on the link speaks as a container of this node, and as one of another node, which uses the tunnel. Its packets
// reach neither containers nor the node, whatever their headers are.
func TestForgedOnTheLink(t *testing.T) {
	testenv.Require(t, testenv.VXLAN)
	a, b := newNodes(t, `"ipMasq": true, "mtu": 1430`)
	own := a.AddPod(t, "own", nil)
	for _, conf := range []string{"all", testenv.UplinkName} {
		testenv.Must(t, a.node().SetSysctl("net/ipv4/conf/"+conf+"/rp_filter", "0"))
	}
	a.reachByTunnel(t, b, testenv.IPv4.Outside, netip.Addr{}, tunnelMTU(testenv.IPv4))
	b.reachByTunnel(t, a, testenv.IPv4.Node, netip.Addr{}, tunnelMTU(testenv.IPv4))
	defer a.leave(t)
	defer b.leave(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		receiver := listenPacket(t, a.pod.Namespace, at(f.Pod(a.pod), 7000))
		want := map[bpf.Reason]uint64{}
		for _, reason := range []bpf.Reason{bpf.ReasonOwnSource, bpf.ReasonNode, bpf.ReasonHeaders} {
			want[reason] = a.dropsFor(t, reason)
		}
		for from, reason := range map[netip.Addr]bpf.Reason{f.Pod(own): bpf.ReasonOwnSource, f.Pod(b.pod): bpf.ReasonNode} {
			for _, d := range disguises {
				packet := testenv.UDPPacket(at(from, 5000), at(f.Pod(a.pod), 7000), d.name+" from "+from.String())
				packet.SrcMAC, packet.DstMAC = b.node().MACOf(t, testenv.UplinkName), a.node().MACOf(t, testenv.UplinkName)
				if d.only6 && f.Is4() {
					continue
				}
				testenv.Must(t, b.node().SendFrames(testenv.UplinkName, d.disguise(packet.MustBuild())))
				want[cmp.Or(d.reason, reason)]++
			}
		}
		within(t, "the drops", func() error { // each frame may be on another CPU
			for reason, n := range want {
				if got := a.dropsFor(t, reason); got != n {
					return fmt.Errorf("for %q: got %d, want %d", maps.Reason(reason), got, n)
				}
			}
			return nil
		})
		sendTo(t, listenPacket(t, b.pod.Namespace, at(f.Pod(b.pod), 0)), at(f.Pod(a.pod), 7000), "by the tunnel")
		for got := ""; got != "by the tunnel"; {
			if got, _ = receiveFrom(t, receiver); got != "by the tunnel" {
				t.Errorf("got %q, want only what came by the tunnel", got)
			}
		}
	})
	if got := a.dropsOf(t, own)[maps.Reason(bpf.ReasonOwnSource)]; got == 0 {
		t.Error("no drop names the container whose address was forged")
	}
}

// VXLAN of others does not leave under the node's address: not as a host port's reply, and not behind headers.
func TestVXLANUnderTheNodesAddress(t *testing.T) {
	a, b := newNodes(t, `"ipMasq": false, "mtu": 1430`)
	hostile := a.AddPod(t, "hostile", mapBoth(8080, 5000)) // inTunnel sends from port 5000
	engine := a.otherEngine6(t)
	a.nft(t, dockerRules)
	forEachUnderlay(t, a, b, func(t *testing.T, under testenv.Family) {
		used := listenPacket(t, hostile.Namespace, at(under.Pod(hostile), 5000))
		sendTo(t, listenPacket(t, b.node(), at(under.Outside, 0)), at(under.Node, 8080), "a client of the host port")
		receiveFrom(t, used)
		for _, f := range testenv.Families {
			receiver := listenPacket(t, b.pod.Namespace, at(f.Pod(b.pod), 7000))
			forged := a.inTunnel(t, under, hostile, at(under.Outside, tunnelPort), tunnelName, at(f.Pod(a.pod), 5000), at(f.Pod(b.pod), 7000), "forged")
			wantRefused := func(what string, ns *testenv.Namespace, device string, frame []byte) {
				t.Helper()
				before := a.dropsFor(t, bpf.ReasonTunnel)
				testenv.Must(t, ns.SendFrames(device, frame))
				within(t, what, func() error {
					if got := a.dropsFor(t, bpf.ReasonTunnel); got != before+1 {
						return fmt.Errorf("drops: got %d, want %d", got, before+1)
					}
					return nil
				})
			}
			wantRefused("a host port's reply", hostile.Namespace, testenv.PodIfName, forged)
			if !under.Is4() {
				packet, err := testenv.Decode(forged)
				testenv.Must(t, err)
				packet.Src, packet.SrcMAC, packet.DstMAC = netip.MustParseAddr("fd00:17::2"), engine.MACOf(t, "eth0"), a.node().MACOf(t, "br9")
				wantRefused("another engine's", engine, "eth0", packet.MustBuild())
				wantRefused("behind three options", engine, "eth0", testenv.Extended(packet.MustBuild(), options...))
			}
			sendTo(t, listenPacket(t, a.pod.Namespace, at(f.Pod(a.pod), 0)), at(f.Pod(b.pod), 7000), "by the tunnel")
			if got, from := receiveFrom(t, receiver); got != "by the tunnel" {
				t.Errorf("got %q from %s, want only what came by the tunnel", got, from)
			}
			receiver.Close()
		}
	})
}

// A packet for a container that is gone ends at its node, and does not leave again by the default route: the plugin's
// routes refuse it, and without them it is dropped.
func TestTunnelForDeletedPods(t *testing.T) {
	a, b := newNodes(t, `"ipMasq": true, "mtu": 1430`)
	pod, gone := b.AddPod(t, "gone", nil), map[string]netip.Addr{}
	for _, f := range testenv.Families {
		b.ip(t, "route", "add", "default", "via", f.Node.String())
		gone[f.Name] = f.Pod(pod)
	}
	del(t, pod)
	b.limitErrorsLess(t)
	forEachUnderlay(t, a, b, func(t *testing.T, _ testenv.Family) {
		for _, f := range testenv.Families {
			wantUnreachable(t, a.pod.Namespace, gone[f.Name])
		}
	})
	for _, subnet := range b.subnets {
		b.ip(t, "route", "del", "unreachable", subnet.String())
	}
	forEachUnderlay(t, a, b, func(t *testing.T, _ testenv.Family) {
		for _, f := range testenv.Families {
			before := b.dropsFor(t, bpf.ReasonNoEndpoint)
			sendTo(t, listenPacket(t, a.pod.Namespace, at(f.Pod(a.pod), 0)), at(gone[f.Name], 7000), "for nobody")
			within(t, "the drop", func() error {
				if got := b.dropsFor(t, bpf.ReasonNoEndpoint); got != before+1 {
					return fmt.Errorf("%s: got %d drops, want %d", f.Name, got, before+1)
				}
				return nil
			})
		}
	})
}
