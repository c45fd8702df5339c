package scenario

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// uplinkNamesOf returns the names of the datapath's uplinks, sorted.
func uplinkNamesOf(t *testing.T, n *network) (names []string) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		if err != nil {
			t.Fatal(err)
		}
		for _, uplink := range uplinks {
			link, err := n.node().Netlink().LinkByIndex(uplink.IfIndex)
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, link.Attrs().Name)
		}
	})
	slices.Sort(names)
	return names
}

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
			wantUplinkNames(t, n, tc.want...)
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
	if err := rtnl.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IP{203, 0, 113, 7}, Mask: net.CIDRMask(32, 32)}}
	if err := rtnl.AddrAdd(veth, address); err != nil {
		t.Fatal(err)
	}
	if err := rtnl.LinkSetUp(veth); err != nil {
		t.Fatal(err)
	}
}

// A device appears whose name a network has chosen as uplink: CHECK reports that it lacks programs, and repair
// attaches them. Other new devices are left alone.
func TestNamedUplinkAppears(t *testing.T) {
	n := newNetworkWith(t, strings.Replace(podsConflist, `"ipMasq"`, `"uplinks": ["eth0", "late*"], "ipMasq"`, 1))
	pod := n.AddPod(t, "a", nil)
	n.AddSecondUplink(t)
	repair(t, n)
	wantUplinkNames(t, n, "eth0")
	late := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "late0"}, PeerName: "peer"}
	if err := n.node().Netlink().LinkAdd(late); err != nil {
		t.Fatal(err)
	}
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "uplink late0 is new") {
		t.Errorf("CHECK: got %v, want it to name late0", err)
	}
	repair(t, n)
	wantUplinkNames(t, n, "eth0", "late0")
	wantCheck(t, pod)
}

func wantUplinkNames(t *testing.T, n *network, want ...string) {
	t.Helper()
	if got := uplinkNamesOf(t, n); !slices.Equal(got, want) {
		t.Errorf("uplinks: got %q, want %q", got, want)
	}
}

// repair calls what `ebpfnetctl repair` does.
func repair(t *testing.T, n *network) {
	t.Helper()
	err := n.node().Do(func() error {
		host, err := operator.Open(loader.OpenLoaded, "")
		if err != nil {
			return err
		}
		defer host.Close()
		_, err = host.Repair(testenv.Context(t))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Without a route, a chosen device's own address serves for masquerading.
func TestNamedUplinkAddress(t *testing.T) {
	n := newNetworkWith(t, strings.Replace(podsConflist, `"ipMasq"`, `"uplinks": ["bare"], "ipMasq"`, 1))
	addBareDevice(t, n.node())
	n.AddPod(t, "a", nil)
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		if want := netip.MustParseAddr("203.0.113.7"); err != nil || len(uplinks) != 1 || uplinks[0].Addr4 != want {
			t.Errorf("uplinks: got %v (%v), want one with %s", uplinks, err, want)
		}
	})
}
