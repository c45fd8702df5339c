package scenario

import (
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// uplinkNamesOf are those that the datapath has.
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

// Names say which devices are uplinks, whatever routes they have; pods' ends are none, even if they
// are meant.
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
			t.Cleanup(func() { removeAll(t, record.DefaultDir) })
			n := newNetworkOf(t, strings.Replace(podsConflist, `"ipMasq"`, `"uplinks": `+tc.names+`, "ipMasq"`, 1))
			n.AddSecondUplink(t)
			addBareDevice(t, n.node())
			n.AddPod(t, "a", nil)
			pod := n.AddPod(t, "b", mapBoth(8080, 80))
			said := string(n.LastCall(t).Stderr)
			if warns := strings.Contains(said, "no device of the host matches uplinks"); warns != (tc.want == nil) {
				t.Errorf("ADD says %q", said)
			}
			if got := uplinkNamesOf(t, n); !slices.Equal(got, tc.want) {
				t.Errorf("uplinks are %q, want %q", got, tc.want)
			}
			if err := pod.Check(testenv.Context(t)); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			inEachFamily(t, func(t *testing.T, f family) {
				if slices.Contains(tc.want, "eth0") {
					reachAsNode(t, pod.Namespace, "tcp", serve(t, n.Outside, "tcp", at(f.outside, 0)), n.Outside, f.node)
				}
				if slices.Contains(tc.want, "eth1") {
					reachAsNode(t, pod.Namespace, "tcp", serve(t, n.SecondOutside, "tcp", at(f.secondOutside, 0)), n.SecondOutside, f.secondNode)
				}
			})
		})
	}
}

// addBareDevice makes a device with addresses that have no subnet, so that no route tells of it.
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

// The next operation of a network that names its uplinks follows new ones that it means, and CHECK
// says before that they lack programs; those of repair follow the names of each pod's network.
func TestNamedUplinkAppears(t *testing.T) {
	t.Cleanup(func() { removeAll(t, record.DefaultDir) })
	n := newNetworkOf(t, strings.Replace(podsConflist, `"ipMasq"`, `"uplinks": ["eth0", "late*"], "ipMasq"`, 1))
	pod := n.AddPod(t, "a", nil)
	n.AddSecondUplink(t)
	repair(t, n)
	if got := uplinkNamesOf(t, n); !slices.Equal(got, []string{"eth0"}) {
		t.Errorf("uplinks are %q", got)
	}
	late := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "late0"}, PeerName: "peer"}
	if err := n.node().Netlink().LinkAdd(late); err != nil {
		t.Fatal(err)
	}
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "uplink late0 is new") {
		t.Errorf("CHECK: %v", err)
	}
	repair(t, n)
	if got := uplinkNamesOf(t, n); !slices.Equal(got, []string{"eth0", "late0"}) {
		t.Errorf("uplinks are %q", got)
	}
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

func removeAll(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}

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

// The address of a chosen device that no route tells of is its own.
func TestNamedUplinkAddress(t *testing.T) {
	t.Cleanup(func() { removeAll(t, record.DefaultDir) })
	n := newNetworkOf(t, strings.Replace(podsConflist, `"ipMasq"`, `"uplinks": ["bare"], "ipMasq"`, 1))
	addBareDevice(t, n.node())
	n.AddPod(t, "a", nil)
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks, err := maps.Uplinks(datapath)
		if want := netip.MustParseAddr("203.0.113.7"); err != nil || len(uplinks) != 1 || uplinks[0].Addr4 != want {
			t.Errorf("uplinks are %v (%v), want one with %s", uplinks, err, want)
		}
	})
}
