package scenario

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// longPackets counts the packets that the node's stack forwards and that are too long for the length
// field of an IP header.
const longPackets = `table inet count { counter forwarded { }
	chain forward { type filter hook forward priority -200; policy accept; meta length > 65535 counter name forwarded } }`

// TCP between pods uses packets of 192 KiB if the kernel can. They leave the node segmented.
func TestBigTCP(t *testing.T) {
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			n := newNetworkWith(t, withKeys(fmt.Sprintf(`"ipMasq": true, "fastPath": "never", "bigTCP": %v`, on)))
			n.nft(t, longPackets)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				if on {
					testenv.Require(t, map[string]testenv.Feature{"IPv4": testenv.BigTCP4, "IPv6": testenv.BigTCP6}[f.Name])
				}
				for _, p := range n.forwardedPaths(f, a, web) {
					t.Run(p.name, func(t *testing.T) {
						before := n.forwarded(t)
						upload(sizeOf(64*mebibyte))(t, p.client, p.server, p.listen, p.dial)
						long := n.forwarded(t) - before
						if want := on && p.client == a.Namespace; (long > 0) != want {
							t.Errorf("%d packets longer than 65535 bytes, want some: %v", long, want)
						}
					})
				}
			})
		})
	}
}

// An uplink whose hardware segments at most 64 KiB would leave longer packets to the CPU, so pods get no
// BIG TCP.
func TestBigTCPNeedsUplinkSupport(t *testing.T) {
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
		t.Fatalf("bridge segments %d bytes, want a device with at most 65536", old.Attrs().TSOMaxSize)
	}
	pod := n.AddPod(t, "a", nil)
	link, err := pod.Netlink().LinkByName(testenv.PodIfName)
	if err != nil {
		t.Fatal(err)
	}
	if size := link.Attrs().GSOMaxSize; size > 1<<16 {
		t.Errorf("pod's packets: got up to %d bytes, want 65536", size)
	}
}
