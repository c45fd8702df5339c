package scenario

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A second uplink comes up while the node works. The next ADD makes it one, for the pods
// that were there before as well.
func TestUplinkAppears(t *testing.T) {
	n := newNetwork(t)
	old := n.AddPod(t, "old", mapBoth(8080, 80))
	n.AddSecondUplink(t)
	next := n.AddPod(t, "next", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		onFirst := serve(t, n.Outside, protocol, at(f.outside, 0))
		onSecond := serve(t, n.SecondOutside, protocol, at(f.secondOutside, 0))
		for _, pod := range []*testenv.Pod{old, next} {
			ping(t, pod.Namespace, f.secondOutside)
			reachAsNode(t, pod.Namespace, protocol, onSecond, n.SecondOutside, f.secondNode)
			reachAsNode(t, pod.Namespace, protocol, onFirst, n.Outside, f.node)
		}
		// Host ports are open on it too.
		serve(t, old.Namespace, protocol, at(f.pod(old), 80))
		reachAsOneself(t, n.SecondOutside, protocol, at(f.secondNode, 8080), old.Namespace)
	})
}

// The same without an ADD: runtimes ask for the status all the time, and that follows the uplinks.
func TestStatusFollowsUplinks(t *testing.T) {
	n := newNetworkOf(t, strings.Replace(podsConflist, "1.0.0", "1.1.0", 1))
	if err := n.Status(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	pod := n.AddPod(t, "a", mapBoth(8080, 80))
	n.AddSecondUplink(t)
	if err := n.Status(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.SecondOutside, protocol, at(f.secondOutside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.SecondOutside, f.secondNode)
		serve(t, pod.Namespace, protocol, at(f.pod(pod), 80))
		reachAsOneself(t, n.SecondOutside, protocol, at(f.secondNode, 8080), pod.Namespace)
	})
}

// Kernels before 6.7 cannot name the address of a route: there the datapath masquerades
// with what the entry says, so it must be complete on every uplink, and on any kernel.
func TestUplinkEntriesAreComplete(t *testing.T) {
	n := newNetwork(t)
	n.AddSecondUplink(t)
	n.AddPod(t, "a", nil)
	var want []maps.Uplink
	for name, addrs := range map[string][2]netip.Addr{
		testenv.UplinkName:       {testenv.NodeAddr4, testenv.NodeAddr6},
		testenv.SecondUplinkName: {testenv.SecondNodeAddr4, testenv.SecondNodeAddr6},
	} {
		want = append(want, maps.Uplink{IfIndex: indexOf(t, n.node(), name), Addr4: addrs[0], Addr6: addrs[1]})
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		if err != nil {
			t.Fatal(err)
		}
		if len(uplinks) != len(want) {
			t.Errorf("uplinks are %v, want %v", uplinks, want)
		}
		for _, uplink := range want {
			if !slices.Contains(uplinks, uplink) {
				t.Errorf("uplinks are %v, want one to be %v", uplinks, uplink)
			}
		}
	})
}

// An uplink goes away. The next ADD removes its entry and pins, and its alone.
func TestUplinkDisappears(t *testing.T) {
	n := newNetwork(t)
	n.AddSecondUplink(t)
	pod := n.AddPod(t, "a", nil)
	first, second := indexOf(t, n.node(), testenv.UplinkName), indexOf(t, n.node(), testenv.SecondUplinkName)
	n.checkUplink(t, first, true)
	n.checkUplink(t, second, true)

	link, err := n.node().Netlink().LinkByIndex(second)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.node().Netlink().LinkDel(link); err != nil {
		t.Fatal(err)
	}
	n.AddPod(t, "b", nil)
	n.checkUplink(t, first, true)
	n.checkUplink(t, second, false)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.node)
	})
}

// The address of an uplink changes. The next ADD writes it down for kernels that cannot
// tell it; where they can, masquerading follows at once.
func TestUplinkChangesAddress(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	// Else the second address of a subnet goes with the first.
	if err := n.node().SetSysctl("net/ipv4/conf/all/promote_secondaries", "1"); err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		n.replaceNodeAddr(t, f, 30)
	}
	n.AddPod(t, "b", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, sibling(f.node, 30))
	})
}

func indexOf(t *testing.T, ns *testenv.Namespace, name string) int {
	t.Helper()
	link, err := ns.Netlink().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().Index
}

// checkUplink looks for the traces of an uplink in the datapath.
func (n *network) checkUplink(t *testing.T, ifindex int, want bool) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, uplink := range uplinks {
			found = found || uplink.IfIndex == ifindex
		}
		if found != want {
			t.Errorf("entry of uplink %d: %v, want %v", ifindex, found, want)
		}
		pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "links", fmt.Sprintf("uplink-%d-*", ifindex)))
		if err != nil {
			t.Fatal(err)
		}
		wantPins := 0
		if want && usesTCX(datapath) {
			wantPins = 2
		}
		if len(pins) != wantPins {
			t.Errorf("pins of uplink %d: %q, want %d", ifindex, pins, wantPins)
		}
	})
}

// replaceNodeAddr gives the node another address on its uplink, and takes the old one.
func (n *network) replaceNodeAddr(t *testing.T, f family, last byte) {
	t.Helper()
	addNodeAddr(t, n, f, last)
	handle := n.node().Netlink()
	uplink, err := handle.LinkByName(testenv.UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := rtnl.Addresses(handle, uplink, netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range addrs {
		if !addr.IP.Equal(f.node.AsSlice()) {
			continue
		}
		if err := handle.AddrDel(uplink, &addr); err != nil {
			t.Fatal(err)
		}
	}
}
