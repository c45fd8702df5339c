package scenario

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// longPackets counts the packets that the node's stack forwards and that are too long for the length
// field of an IP header.
const longPackets = `table inet count { counter forwarded { }
	chain forward { type filter hook forward priority -200; policy accept; meta length > 65535 counter name forwarded } }`

// TCP between pods uses packets of 192 KiB if the kernel can and the uplink takes them whole.
func TestBigTCP(t *testing.T) {
	for _, mode := range []string{"auto", "never"} {
		t.Run(mode, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(fmt.Sprintf(`"ipMasq": true, "fastPath": "never", "bigTCP": %q`, mode)))
			n.raiseUplink(t)
			n.nft(t, longPackets)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				if mode == "auto" {
					testenv.Require(t, bigTCP[f.Name])
				}
				for _, p := range n.forwardedPaths(f, a, web) {
					t.Run(p.name, func(t *testing.T) {
						long := func() int {
							before := n.forwarded(t)
							upload(sizeOf(64*mebibyte))(t, p.client, p.server, p.listen, p.dial)
							return n.forwarded(t) - before
						}
						if mode == "never" || p.client != a.Namespace {
							if got := long(); got > 0 {
								t.Errorf("%d packets longer than 65535 bytes, want none", got)
							}
							return
						}
						testenv.Eventually(t, "packets longer than 65535 bytes", func() error { // a sender on a busy machine paces shorter ones
							if long() == 0 {
								return errors.New("none")
							}
							return nil
						})
					})
				}
			})
		})
	}
}

var bigTCP = map[string]testenv.Feature{"IPv4": testenv.BigTCP4, "IPv6": testenv.BigTCP6}

// raiseUplink has the node's uplink take packets of 192 KiB, if the kernel can.
func (n *network) raiseUplink(t *testing.T) {
	t.Helper()
	const size = 192 << 10
	uplink, err := n.node().Netlink().LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	if testenv.BigTCP6.Probe() == nil {
		err = n.node().Netlink().LinkSetGSOMaxSize(uplink, size)
	}
	if testenv.BigTCP4.Probe() == nil {
		err = errors.Join(err, n.node().Netlink().LinkSetGSOIPv4MaxSize(uplink, size))
	}
	testenv.Must(t, err)
}

// Streams leave by the uplink in packets as long as a socket of the host sends, and are not cut into frames.
func TestStreamsLeaveWhole(t *testing.T) {
	n := newNetwork(t)
	for _, uplink := range []string{"as made", "raised"} {
		t.Run(uplink, func(t *testing.T) {
			if uplink == "raised" {
				n.raiseUplink(t)
			}
			a := n.AddPod(t, uplink[:2], nil)
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				const bytes, frame = 64 * mebibyte, 1448
				testenv.Eventually(t, "few packets", func() error { // a sender on a busy machine paces shorter ones
					before := packetsIn(t, n.Outside)
					upload(sizeOf(bytes))(t, a.Namespace, n.Outside, at(f.Outside, 80), at(f.Outside, 80))
					if got, most := packetsIn(t, n.Outside)-before, sizeOf(bytes)/frame/4; got > most {
						return fmt.Errorf("got %d packets for %d bytes, want at most %d", got, sizeOf(bytes), most)
					}
					return nil
				})
			})
		})
	}
}

// packetsIn returns how many packets a host outside has received.
func packetsIn(t *testing.T, outside *testenv.Namespace) int64 {
	t.Helper()
	uplink, err := outside.Netlink().LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	return int64(uplink.Attrs().Statistics.RxPackets)
}
