package scenario

import (
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The key uplinks chooses devices by name, whatever their routes. It never chooses the host's ends of pods' veths.
func TestUplinkNames(t *testing.T) {
	for _, tc := range []struct {
		names string
		want  []string
	}{
		{`["eth0"]`, []string{"eth0"}},
		{`["eth1"]`, []string{"eth1"}},
		{`["eth?"]`, []string{"eth0", "eth1"}},
		{`["e*", "bare"]`, []string{"bare", "eth0", "eth1"}},
		{`["none"]`, nil},
	} {
		t.Run(tc.names, func(t *testing.T) {
			n := newNetworkWith(t, strings.Replace(podsConflist, `"ipMasq"`, `"uplinks": `+tc.names+`, "ipMasq"`, 1))
			n.AddSecondUplink(t)
			addBareDevice(t, n.node())
			n.AddPod(t, "a", nil)
			pod := n.AddPod(t, "b", mapBoth(8080, 80))
			stderr := string(n.LastCall(t).Stderr)
			if warns := strings.Contains(stderr, "no device of the host matches uplinks"); warns != (tc.want == nil) {
				t.Errorf("ADD's stderr: got %q, want a warning: %v", stderr, tc.want == nil)
			}
			n.wantUplinks(t, tc.want...)
			wantCheck(t, pod)
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				if slices.Contains(tc.want, "eth0") {
					reachAsNode(t, pod.Namespace, "tcp", serve(t, n.Outside, "tcp", at(f.Outside, 0)), n.Outside, f.Node)
				}
				if slices.Contains(tc.want, "eth1") {
					reachAsNode(t, pod.Namespace, "tcp", serve(t, n.SecondOutside, "tcp", at(f.SecondOutside, 0)), n.SecondOutside, f.SecondNode)
				}
			})
		})
	}
}

// addBareDevice makes a device whose address has no subnet, and which therefore has no route.
func addBareDevice(t *testing.T, ns *testenv.Namespace) {
	t.Helper()
	rtnl := ns.Netlink()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "bare"}, PeerName: "peer"}
	testenv.Must(t, rtnl.LinkAdd(veth))
	address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IP{203, 0, 113, 7}, Mask: net.CIDRMask(32, 32)}}
	testenv.Must(t, rtnl.AddrAdd(veth, address))
	testenv.Must(t, rtnl.LinkSetUp(veth))
}
