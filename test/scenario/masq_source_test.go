package scenario

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The node prefers another source address from now on, as with a new temporary address of IPv6 each day. Open
// connections keep the former one while it is the node's; new ones get the new one.
func TestSourceOfOpenConnections(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		testenv.Require(t, testenv.FIBSource)
		n := newNetworkWith(t, conflist)
		pod := n.AddPod(t, "a", nil)
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			server := serve(t, n.Outside, protocol, at(f.Outside, 0))
			client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
			defer client.Close()
			before := ask(t, client, n.Outside)
			if before.Addr() != f.Node {
				t.Fatalf("server sees %s, want %s", before, f.Node)
			}
			n.preferSource(t, f, sibling(f.Node, 31))
			defer n.preferSource(t, f, f.Node)
			for range 20 {
				if after := ask(t, client, n.Outside); after != before {
					t.Fatalf("server sees %s, want %s as before", after, before)
				}
			}
			reachAsNode(t, pod.Namespace, protocol, server, n.Outside, sibling(f.Node, 31))
			for range 20 {
				if after := ask(t, client, n.Outside); after != before {
					t.Fatalf("beside a new connection, server sees %s, want %s as before", after, before)
				}
			}
		})
	})
}

// preferSource gives the node's uplink the address, and makes it the preferred source towards the uplink's subnet.
func (n *network) preferSource(t *testing.T, f testenv.Family, addr netip.Addr) {
	t.Helper()
	handle := n.node().Netlink()
	uplink, err := handle.LinkByName(testenv.UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	ipNet := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(f.PrefixLen, addr.BitLen())}
	if err := handle.AddrReplace(uplink, &netlink.Addr{IPNet: ipNet}); err != nil {
		t.Fatal(err)
	}
	if err := n.node().WaitUp(testenv.UplinkName); err != nil {
		t.Fatal(err)
	}
	subnet, err := f.Outside.Prefix(f.PrefixLen)
	if err != nil {
		t.Fatal(err)
	}
	priority := 0
	if !f.Is4() {
		priority = 1 // before the kernel's own
	}
	err = handle.RouteReplace(&netlink.Route{
		LinkIndex: uplink.Attrs().Index, Scope: netlink.SCOPE_LINK, Src: addr.AsSlice(), Priority: priority,
		Dst: &net.IPNet{IP: subnet.Addr().AsSlice(), Mask: net.CIDRMask(subnet.Bits(), addr.BitLen())},
	})
	if err != nil {
		t.Fatal(err)
	}
}
