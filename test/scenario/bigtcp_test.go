package scenario

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// longPackets counts what the node's stack forwards that is too long for an IP header's length.
const longPackets = `table inet count { counter forwarded { }
	chain forward { type filter hook forward priority -200; policy accept; meta length > 65535 counter name forwarded } }`

// TCP of pods has packets of 192 KiB where the kernel can, which leave the node as what the wire takes.
func TestBigTCP(t *testing.T) {
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			n := newNetworkOf(t, withKeys(fmt.Sprintf(`"ipMasq": true, "fastPath": "never", "bigTCP": %v`, on)))
			n.nft(t, longPackets)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			inEachFamily(t, func(t *testing.T, f family) {
				if on {
					testenv.Require(t, map[string]testenv.Feature{"IPv4": testenv.BigTCP4, "IPv6": testenv.BigTCP6}[f.name])
				}
				for _, w := range n.ways(f, a, web) {
					t.Run(w.name, func(t *testing.T) {
						before := n.forwarded(t)
						upload(sizeOf(64*mebibyte))(t, w.from, w.server, w.listen, w.to)
						long := n.forwarded(t) - before
						if want := on && w.from == a.Namespace; (long > 0) != want {
							t.Errorf("%d packets were longer than 65535 bytes", long)
						}
					})
				}
			})
		})
	}
}

// An uplink whose hardware cuts packets of the usual size alone would leave longer ones to the CPU.
func TestBigTCPNeedsUplink(t *testing.T) {
	n := newNetwork(t)
	for _, command := range [][]string{
		{"ip", "link", "add", "old", "type", "bridge"},
		{"ip", "address", "add", "198.18.0.1/30", "dev", "old"},
		{"ip", "link", "set", "old", "up"},
		{"ip", "route", "replace", "default", "via", "198.18.0.2", "dev", "old"},
	} {
		if _, err := n.node().Run(testenv.Context(t), command[0], command[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	old, err := n.node().Netlink().LinkByName("old")
	if err != nil {
		t.Fatal(err)
	}
	if old.Attrs().TSOMaxSize > 1<<16 {
		t.Fatalf("a bridge takes %d bytes: this is about a device that takes less", old.Attrs().TSOMaxSize)
	}
	pod := n.AddPod(t, "a", nil)
	link, err := pod.Netlink().LinkByName(testenv.PodIfName)
	if err != nil {
		t.Fatal(err)
	}
	if size := link.Attrs().GSOMaxSize; size > 1<<16 {
		t.Errorf("packets of the pod may have %d bytes", size)
	}
}
