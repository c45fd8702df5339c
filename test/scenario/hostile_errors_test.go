package scenario

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A pod with a host port says that packets of its clients on this host are too big. That must not slow down what
// others on the host send to the same address, which is one of the host's own.
func TestErrorsLowerNoLocalPathMTU(t *testing.T) {
	const mtu = 1280 // the least that IPv6 accepts

	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		serve(t, web.Namespace, "udp", at(f.Pod(web), 80))
		for _, client := range []struct {
			from *testenv.Namespace
			addr netip.Addr
		}{{n.node(), f.Loopbacks[0]}, {n.node(), f.Node}, {a.Namespace, f.Node}} {
			c := connect(t, client.from, "udp", netip.AddrPort{}, at(client.addr, 8080))
			defer c.Close()
			about := testenv.UDPPacket(ask(t, c, web.Namespace), at(f.Pod(web), 80), "x").MustBuild()
			kind := map[bool][2]uint8{true: {3, 4}, false: {2, 0}}[f.Is4()] // packet too big
			tooBig, err := testenv.ICMPErrorPacket(f.Pod(web), about, kind[0], kind[1], mtu, 0)
			if err != nil {
				t.Fatal(err)
			}
			wireOf(t, web).send(t, tooBig)
			ping(t, n.node(), f.Pod(web)) // comes after it
			route, err := client.from.Run(testenv.Context(t), "ip", "route", "get", client.addr.String())
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(route, fmt.Sprintf("mtu %d", mtu)) {
				t.Errorf("%s to %s: the kernel uses an MTU of %d: %s", client.from.Name, client.addr, mtu, route)
			}
		}
	})
}
