package scenario

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A pod that may send as a router, because antiSpoof is off, is none of the host's routers: CVE-2020-10749.
func TestRouterAdvertisementOfPod(t *testing.T) {
	const acceptRA = "net/ipv6/conf/%s/accept_ra"

	off := withKeys(`"antiSpoof": false`)
	for _, test := range []struct {
		name, conflist string
		accept         string // of new devices
	}{
		{"host that forwards no IPv6", strings.NewReplacer(`, [{"subnet": "fd00:88::/64"}]`, "", `, {"dst": "::/0"}`, "").Replace(off), "1"},
		{"host that forwards IPv6", off, "2"},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newNetworkWith(t, test.conflist)
			testenv.Must(t, n.node().SetSysctl(fmt.Sprintf(acceptRA, "default"), test.accept))
			pod := n.AddPod(t, "router", nil)
			device, err := n.node().Netlink().LinkByIndex(n.hostDeviceOf(t, pod))
			testenv.Must(t, err)
			advertise := func() []netlink.Route {
				t.Helper()
				frame := testenv.Frame{Name: "router advertisement", Bytes: advertisementOf(t, pod)}
				n.wantPassing(t, pod, []testenv.Frame{frame, frame}) // the stack has the first one before the second passes
				learned := &netlink.Route{LinkIndex: device.Attrs().Index, Protocol: unix.RTPROT_RA}
				routes, err := rtnl.Routes(n.node().Netlink(), netlink.FAMILY_V6, learned, netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
				testenv.Must(t, err)
				return routes
			}
			if routes := advertise(); len(routes) > 0 {
				t.Errorf("routes that the host has learned from the pod: got %v, want none", routes)
			}
			testenv.Must(t, n.node().SetSysctl(fmt.Sprintf(acceptRA, device.Attrs().Name), "2"))
			testenv.Eventually(t, "the host to learn a route where it may", func() error { // the frame is a valid one
				if len(advertise()) == 0 {
					return fmt.Errorf("no route")
				}
				return nil
			})
		})
	}
}

// advertisementOf returns a router advertisement with a lifetime of 1800 s.
func advertisementOf(t *testing.T, pod *testenv.Pod) []byte {
	t.Helper()
	mac := pod.MACOf(t, testenv.PodIfName)
	return testenv.Packet{
		SrcMAC: mac, DstMAC: pod.HostMAC(t), TTL: 255,
		Src: testenv.LinkLocalOf(mac), Dst: netip.MustParseAddr("ff02::1"),
		Proto: unix.IPPROTO_ICMPV6, Type: 134, Rest: 64<<24 | 1800, Payload: string(make([]byte, 8)),
	}.MustBuild()
}

// A host that forwards continues to learn routes from the routers on its devices, and does not begin to on those that
// come later.
func TestAcceptRouterAdvertisements(t *testing.T) {
	n := newNetwork(t)
	node := n.node()
	testenv.Must(t, node.SetSysctl("net/ipv6/conf/"+testenv.UplinkName+"/accept_ra", "1"))
	before, err := node.Sysctl("net/ipv6/conf/default/accept_ra")
	testenv.Must(t, err)
	n.AddPod(t, "a", nil)
	for device, want := range map[string]string{testenv.UplinkName: "2", "default": before} {
		if got, err := node.Sysctl("net/ipv6/conf/" + device + "/accept_ra"); err != nil || got != want {
			t.Errorf("accept_ra of %s: got %s (%v), want %s", device, got, err, want)
		}
	}
}
