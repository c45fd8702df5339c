package testenv

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// UplinkKind is a kind of device for an uplink.
type UplinkKind struct {
	Name    string
	Feature Feature
	// move adds the device on the node and, if necessary, on the outside host, and returns both
	// names.
	move func(tb TB, t *Topology) (node, outside string, err error)
}

// UplinkKinds are all kinds except the veth of a new [Topology].
var UplinkKinds = []UplinkKind{
	{"bridge", Feature{Name: "bridge", Module: "bridge", Probe: probeLink(&netlink.Bridge{LinkAttrs: named("probe")})}, addBridge},
	{"bond", Feature{Name: "bonding", Module: "bonding", Probe: probeLink(netlink.NewLinkBond(named("probe")))}, addBond},
	{"vlan", Feature{Name: "802.1Q", Module: "8021q", Probe: probeAbove(func(attrs netlink.LinkAttrs) netlink.Link {
		return &netlink.Vlan{LinkAttrs: attrs, VlanId: 5}
	})}, addVLANs},
	{"tun", Feature{Name: "tun", Module: "tun", Probe: probeTUN}, addTUNs},
}

// Macvlan is a device on top of another one.
var Macvlan = Feature{Name: "macvlan", Module: "macvlan", Probe: probeAbove(func(attrs netlink.LinkAttrs) netlink.Link {
	return &netlink.Macvlan{LinkAttrs: attrs}
})}

func named(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

// above is for a device on top of another one.
func above(device netlink.Link, name string) netlink.LinkAttrs {
	attrs := named(name)
	attrs.ParentIndex = device.Attrs().Index
	return attrs
}

func probeLink(device netlink.Link) func() error {
	return func() error { return inScratch(func() error { return netlink.LinkAdd(device) }) }
}

// MoveUplink replaces the first uplink with another kind of device, which gets the addresses and the
// default routes, on the node and outside.
func (t *Topology) MoveUplink(tb TB, kind UplinkKind) (device string) {
	tb.Helper()
	node, outside, err := kind.move(tb, t)
	if err != nil {
		tb.Fatalf("make a %s: %v", kind.Name, err)
	}
	if err := errors.Join(
		t.Node.moveAddresses(node, []netip.Addr{NodeAddr4, NodeAddr6}),
		t.Outside.moveAddresses(outside, []netip.Addr{OutsideAddr4, OutsideAddr6}),
	); err != nil {
		tb.Fatalf("move addresses to a %s: %v", kind.Name, err)
	}
	for _, gateway := range []netip.Addr{OutsideAddr4, OutsideAddr6} {
		everything := netip.PrefixFrom(Unspecified(gateway), 0)
		if err := t.Node.rtnl.RouteDel(routeOf(everything, gateway)); err != nil && !errors.Is(err, unix.ESRCH) { // the kernel may have removed it with the address
			tb.Fatalf("remove the route on the first uplink: %v", err)
		}
		if err := t.Node.AddRoute(everything, gateway); err != nil {
			tb.Fatalf("add a route on a %s: %v", kind.Name, err)
		}
	}
	return node
}

// moveAddresses moves the addresses from the first uplink to device.
func (ns *Namespace) moveAddresses(device string, addrs []netip.Addr) error {
	if device == UplinkName {
		return nil
	}
	uplink, err := ns.rtnl.LinkByName(UplinkName)
	if err != nil {
		return err
	}
	present, err := rtnl.Addresses(ns.rtnl, uplink, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, addr := range present {
		if addr.Scope != unix.RT_SCOPE_UNIVERSE {
			continue
		}
		if err := ns.rtnl.AddrDel(uplink, &addr); err != nil {
			return err
		}
	}
	if err := ns.configure(device, addrs); err != nil {
		return err
	}
	if device == tunName { // its state never becomes up
		return nil
	}
	return ns.WaitUp(device)
}

func addBridge(_ TB, t *Topology) (node, outside string, err error) {
	uplink, err := t.Node.rtnl.LinkByName(UplinkName)
	if err != nil {
		return "", "", err
	}
	bridge := &netlink.Bridge{LinkAttrs: named("br0")}
	if err := t.Node.rtnl.LinkAdd(bridge); err != nil {
		return "", "", err
	}
	return "br0", UplinkName, t.Node.rtnl.LinkSetMaster(uplink, bridge)
}

func addBond(_ TB, t *Topology) (node, outside string, err error) {
	uplink, err := t.Node.rtnl.LinkByName(UplinkName)
	if err != nil {
		return "", "", err
	}
	bond := netlink.NewLinkBond(named("bond0"))
	bond.Mode = netlink.BOND_MODE_ACTIVE_BACKUP
	bond.Miimon = 10 // ms
	if err := t.Node.rtnl.LinkAdd(bond); err != nil {
		return "", "", err
	}
	return "bond0", UplinkName, errors.Join(
		t.Node.rtnl.LinkSetDown(uplink),
		t.Node.rtnl.LinkSetMaster(uplink, bond),
		t.Node.rtnl.LinkSetUp(uplink),
		t.Node.rtnl.LinkSetUp(bond),
	)
}

func addVLANs(_ TB, t *Topology) (node, outside string, err error) {
	const name = UplinkName + ".5"
	for _, ns := range []*Namespace{t.Node, t.Outside} {
		uplink, err := ns.rtnl.LinkByName(UplinkName)
		if err != nil {
			return "", "", err
		}
		if err := ns.rtnl.LinkAdd(&netlink.Vlan{LinkAttrs: above(uplink, name), VlanId: 5}); err != nil {
			return "", "", err
		}
	}
	return name, name, nil
}

const tunName = "tun0"

// addTUNs adds a device without link-layer header on each side, and forwards packets between them until
// the end of the test.
func addTUNs(tb TB, t *Topology) (node, outside string, err error) {
	var ends [2]*os.File
	for i, ns := range []*Namespace{t.Node, t.Outside} {
		err := ns.Do(func() (err error) {
			ends[i], err = openTUN(tunName)
			return err
		})
		if err != nil {
			return "", "", err
		}
	}
	done := make(chan struct{}, len(ends))
	for i := range ends {
		go func() {
			carry(ends[i], ends[1-i])
			done <- struct{}{}
		}()
	}
	tb.Cleanup(func() {
		for _, end := range ends {
			end.Close()
		}
		for range ends {
			<-done
		}
	})
	return tunName, tunName, nil
}

// carry copies packets, one with each read, until from is closed.
func carry(to io.Writer, from io.Reader) {
	packet := make([]byte, 1<<16)
	for {
		length, err := from.Read(packet)
		if err != nil {
			return
		}
		_, _ = to.Write(packet[:length]) // lost if the other end is down, as on any wire
	}
}

// openTUN adds a TUN device in the calling thread's namespace. Closing the file removes it.
func openTUN(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// probeAbove adds a device on top of another.
func probeAbove(device func(netlink.LinkAttrs) netlink.Link) func() error {
	return func() error {
		return inScratch(func() error {
			below := netlink.NewVeth(named("below"))
			below.PeerName = "peer"
			if err := netlink.LinkAdd(below); err != nil {
				return err
			}
			return netlink.LinkAdd(device(above(below, "probe")))
		})
	}
}

func probeTUN() error {
	return inScratch(func() error {
		tun, err := openTUN("probe")
		if err != nil {
			return err
		}
		return tun.Close()
	})
}
