package scenario

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A second external interface appears. The next ADD makes it an uplink, for older pods too.
func TestUplinkAppears(t *testing.T) {
	n := newNetwork(t)
	old := n.AddPod(t, "old", mapBoth(8080, 80))
	n.AddSecondUplink(t)
	next := n.AddPod(t, "next", nil)
	n.wantUplinkEntries(t)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		first := serve(t, n.Outside, protocol, at(f.Outside, 0))
		second := serve(t, n.SecondOutside, protocol, at(f.SecondOutside, 0))
		for _, pod := range []*testenv.Pod{old, next} {
			ping(t, pod.Namespace, f.SecondOutside)
			reachAsNode(t, pod.Namespace, protocol, second, n.SecondOutside, f.SecondNode)
			reachAsNode(t, pod.Namespace, protocol, first, n.Outside, f.Node)
		}
		// It serves host ports too.
		serve(t, old.Namespace, protocol, at(f.Pod(old), 80))
		reachUntranslated(t, n.SecondOutside, protocol, at(f.SecondNode, 8080), old.Namespace)
	})
}

// wantUplinkEntries wants every entry to have both families' addresses, on any kernel. Before 6.7 a program cannot ask for a
// route's source address, so the datapath masquerades with that of the uplink's entry.
func (n *network) wantUplinkEntries(t *testing.T) {
	t.Helper()
	var want []maps.Uplink
	for name, addrs := range map[string][2]netip.Addr{
		testenv.UplinkName:       {testenv.NodeAddr4, testenv.NodeAddr6},
		testenv.SecondUplinkName: {testenv.SecondNodeAddr4, testenv.SecondNodeAddr6},
	} {
		want = append(want, maps.Uplink{IfIndex: indexOf(t, n.node(), name), Addr4: addrs[0], Addr6: addrs[1]})
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		testenv.Must(t, err)
		isMissing := func(uplink maps.Uplink) bool { return !slices.Contains(uplinks, uplink) }
		if len(uplinks) != len(want) || slices.ContainsFunc(want, isMissing) {
			t.Errorf("uplinks: got %v, want %v", uplinks, want)
		}
	})
}

// An uplink disappears. The next ADD removes its entry and pins, and no others.
func TestUplinkDisappears(t *testing.T) {
	n := newNetwork(t)
	n.AddSecondUplink(t)
	pod := n.AddPod(t, "a", nil)
	first, second := indexOf(t, n.node(), testenv.UplinkName), indexOf(t, n.node(), testenv.SecondUplinkName)
	n.wantUplink(t, first, true)
	n.wantUplink(t, second, true)

	link, err := n.node().Netlink().LinkByIndex(second)
	testenv.Must(t, err)
	testenv.Must(t, n.node().Netlink().LinkDel(link))
	n.AddPod(t, "b", nil)
	n.wantUplink(t, first, true)
	n.wantUplink(t, second, false)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.Node)
	})
}

// The address of an uplink changes. The next ADD updates its entry, and masquerading uses the new address.
func TestUplinkAddressChange(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	// Otherwise a subnet's second address is removed with its first.
	testenv.Must(t, n.node().SetSysctl("net/ipv4/conf/all/promote_secondaries", "1"))
	for _, f := range testenv.Families {
		n.replaceNodeAddr(t, f, 30)
	}
	n.AddPod(t, "b", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, sibling(f.Node, 30))
	})
}

func indexOf(t *testing.T, ns *testenv.Namespace, name string) int {
	t.Helper()
	link, err := ns.Netlink().LinkByName(name)
	testenv.Must(t, err)
	return link.Attrs().Index
}

// wantUplink wants the datapath to have an uplink's entry and pins, or neither.
func (n *network) wantUplink(t *testing.T, ifindex int, want bool) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		testenv.Must(t, err)
		got := slices.ContainsFunc(uplinks, func(u maps.Uplink) bool { return u.IfIndex == ifindex })
		if got != want {
			t.Errorf("entry of uplink %d: got %v, want %v", ifindex, got, want)
		}
		pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "links", fmt.Sprintf("uplink-%d-*", ifindex)))
		testenv.Must(t, err)
		wantPins := 0
		if want && usesTCX(datapath) {
			wantPins = 2
		}
		if len(pins) != wantPins {
			t.Errorf("pins of uplink %d: got %q, want %d", ifindex, pins, wantPins)
		}
	})
}

// replaceNodeAddr replaces the address of the node's uplink.
func (n *network) replaceNodeAddr(t *testing.T, f testenv.Family, last byte) {
	t.Helper()
	addNodeAddr(t, n, f, last)
	handle := n.node().Netlink()
	uplink, err := handle.LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	addrs, err := rtnl.Addresses(handle, uplink, netlink.FAMILY_ALL)
	testenv.Must(t, err)
	for _, addr := range addrs {
		if !addr.IP.Equal(f.Node.AsSlice()) {
			continue
		}
		testenv.Must(t, handle.AddrDel(uplink, &addr))
	}
}
