package testenv

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Addresses of a [Topology]. The second uplink's exist only after [Topology.AddSecondUplink].
var (
	NodeAddr4    = netip.MustParseAddr("192.0.2.1")
	NodeAddr6    = netip.MustParseAddr("2001:db8:1::1")
	OutsideAddr4 = netip.MustParseAddr("192.0.2.2")
	OutsideAddr6 = netip.MustParseAddr("2001:db8:1::2")

	SecondNodeAddr4    = netip.MustParseAddr("198.51.100.1")
	SecondNodeAddr6    = netip.MustParseAddr("2001:db8:2::1")
	SecondOutsideAddr4 = netip.MustParseAddr("198.51.100.2")
	SecondOutsideAddr6 = netip.MustParseAddr("2001:db8:2::2")
)

const (
	// UplinkName is the node's uplink, and the outside host's device to the node.
	// SecondUplinkName is the node's second uplink.
	UplinkName       = "eth0"
	SecondUplinkName = "eth1"

	prefixLen4 = 24
	prefixLen6 = 64
)

// Topology is a node, where the plugin runs, and a host outside, connected by a veth with the node's
// default routes. Offloads are on. The outside host has no route to pods, so it cannot reply to a
// packet whose source is a pod's address. The node's ip_forward is 0, as on a fresh machine.
type Topology struct {
	Node    *Namespace
	Outside *Namespace
	// SecondOutside is nil before AddSecondUplink.
	SecondOutside *Namespace
	// Router and Far are nil before AddFar.
	Router, Far *Namespace
}

// uplink is one link from the node to an outside host.
type uplink struct {
	nodeDevice, peerDevice string
	outside                *Namespace
	node, peer             []netip.Addr
}

// NewTopology builds a topology and waits until its links work.
func NewTopology(tb TB) *Topology {
	tb.Helper()
	t := &Topology{Node: New(tb, "node"), Outside: New(tb, "outside")}
	if err := t.connect(t.firstUplink()); err != nil {
		tb.Fatalf("build topology: %v", err)
	}
	for _, gateway := range t.firstUplink().peer {
		if err := t.Node.AddRoute(netip.PrefixFrom(Unspecified(gateway), 0), gateway); err != nil {
			tb.Fatalf("build topology: %v", err)
		}
	}
	return t
}

// AddSecondUplink adds a second uplink, to a second host outside. The default routes stay on the
// first one.
func (t *Topology) AddSecondUplink(tb TB) {
	tb.Helper()
	t.SecondOutside = New(tb, "outside2")
	if err := t.connect(t.secondUplink()); err != nil {
		tb.Fatalf("build second uplink: %v", err)
	}
}

// AddSecondLink connects the node's second uplink to the host outside that has the first. All routes stay on the first.
func (t *Topology) AddSecondLink(tb TB) {
	tb.Helper()
	up := t.secondUplink()
	up.outside, up.peerDevice = t.Outside, SecondUplinkName
	if err := t.connect(up); err != nil {
		tb.Fatalf("build second link: %v", err)
	}
}

// ConfigureSecondUplink sets the addresses of the node's second uplink and sets it up, as AddSecondUplink
// did, after a test has taken it down.
func (t *Topology) ConfigureSecondUplink(tb TB) {
	tb.Helper()
	up := t.secondUplink()
	if err := t.Node.configure(up.nodeDevice, up.node); err != nil {
		tb.Fatalf("configure second uplink: %v", err)
	}
	if err := t.Node.WaitUp(up.nodeDevice); err != nil {
		tb.Fatalf("configure second uplink: %v", err)
	}
}

// RouteTo adds routes to prefix via the node on the hosts outside.
func (t *Topology) RouteTo(tb TB, prefix netip.Prefix) {
	tb.Helper()
	uplinks := []uplink{t.firstUplink()}
	if t.SecondOutside != nil {
		uplinks = append(uplinks, t.secondUplink())
	}
	for _, up := range uplinks {
		for _, gateway := range up.node {
			if gateway.Is4() != prefix.Addr().Is4() {
				continue
			}
			if err := up.outside.AddRoute(prefix, gateway); err != nil {
				tb.Fatalf("route to pods: %v", err)
			}
		}
	}
}

func (t *Topology) firstUplink() uplink {
	return uplink{
		nodeDevice: UplinkName, peerDevice: UplinkName, outside: t.Outside,
		node: []netip.Addr{NodeAddr4, NodeAddr6},
		peer: []netip.Addr{OutsideAddr4, OutsideAddr6},
	}
}

func (t *Topology) secondUplink() uplink {
	return uplink{
		nodeDevice: SecondUplinkName, peerDevice: UplinkName, outside: t.SecondOutside,
		node: []netip.Addr{SecondNodeAddr4, SecondNodeAddr6},
		peer: []netip.Addr{SecondOutsideAddr4, SecondOutsideAddr6},
	}
}

// connect adds the veth of up, sets the addresses of both ends, and waits until they work.
func (t *Topology) connect(up uplink) error {
	veth := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: up.nodeDevice, TxQLen: -1},
		PeerName:      up.peerDevice,
		PeerNamespace: netlink.NsFd(int(up.outside.fd)),
	}
	if err := t.Node.rtnl.LinkAdd(veth); err != nil {
		return fmt.Errorf("make veth %s: %w", up.nodeDevice, err)
	}
	if err := t.Node.configure(up.nodeDevice, up.node); err != nil {
		return err
	}
	if err := up.outside.configure(up.peerDevice, up.peer); err != nil {
		return err
	}
	if err := t.Node.WaitUp(up.nodeDevice); err != nil {
		return err
	}
	return up.outside.WaitUp(up.peerDevice)
}

// configure sets the addresses of a device and sets it up, without duplicate address detection on this
// device.
func (ns *Namespace) configure(device string, addrs []netip.Addr) error {
	if err := ns.SetSysctl("net/ipv6/conf/"+device+"/accept_dad", "0"); err != nil {
		return err
	}
	link, err := ns.rtnl.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", device, ns.Name, err)
	}
	for _, addr := range addrs {
		bits, flags := prefixLen4, 0
		if addr.Is6() {
			bits, flags = prefixLen6, unix.IFA_F_NODAD
		}
		ipNet := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(bits, addr.BitLen())}
		if err := ns.rtnl.AddrAdd(link, &netlink.Addr{IPNet: ipNet, Flags: flags}); err != nil {
			return fmt.Errorf("add %s to %s in %s: %w", addr, device, ns.Name, err)
		}
	}
	if err := ns.rtnl.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up in %s: %w", device, ns.Name, err)
	}
	return nil
}

// WaitUp waits until device has a carrier and no tentative addresses, which the kernel does not use yet.
func (ns *Namespace) WaitUp(device string) error {
	ctx, cancel := timeoutContext(Timeout)
	defer cancel()
	return Wait(ctx, device+" in "+ns.Name, func() error {
		link, err := ns.rtnl.LinkByName(device)
		if err != nil {
			return err
		}
		if state := link.Attrs().OperState; state != netlink.OperUp {
			return fmt.Errorf("state is %s", state)
		}
		addrs, err := rtnl.Addresses(ns.rtnl, link, netlink.FAMILY_V6)
		if err != nil {
			return err
		}
		for _, addr := range addrs {
			if addr.Flags&unix.IFA_F_TENTATIVE != 0 {
				return fmt.Errorf("address %s is tentative", addr.IPNet)
			}
		}
		return nil
	})
}
