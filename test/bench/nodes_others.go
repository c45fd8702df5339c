package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The objects of other network plugins on a node, created without their agents.

// joinByRoutes adds routes to the other node's pods by its addresses.
func joinByRoutes(n, other node) error {
	for i, subnet := range other.subnets {
		if err := n.AddRoute(subnet, other.addrs[i]); err != nil {
			return err
		}
	}
	return nil
}

// joinAsKindnet adds the objects that kindnet has by default: it does not masquerade between nodes, and a flowtable takes over
// connections after 20 packets.
func joinAsKindnet(n, other node) error {
	const rules = `
table inet fastpath {
	set members { type ifname; elements = { %[1]s } }
	flowtable offloaded { hook ingress priority 5; devices = { %[1]s }; }
	chain forward {
		type filter hook forward priority mangle
		iifname != @members return
		oifname != @members return
		ct state established ct packets > 20 flow add @offloaded counter
	}
}
`
	links, err := rtnl.Links(n.Netlink())
	if err != nil {
		return err
	}
	var devices []string
	for _, link := range links {
		if link.Type() == "veth" {
			devices = append(devices, link.Attrs().Name)
		}
	}
	text := fmt.Sprintf(rules, strings.Join(devices, ", "))
	return errors.Join(joinWithoutFlowtable(n, other), restore(n.Namespace, text, "nft", "-f", "-"))
}

// joinWithoutFlowtable adds the objects that kindnet has on a kernel without flowtables.
func joinWithoutFlowtable(n, other node) error {
	const rules = `
table inet ipmasq {
	set exempt4 { type ipv4_addr; flags interval; elements = { %[1]s } }
	set exempt6 { type ipv6_addr; flags interval; elements = { %[2]s } }
	chain postrouting {
		type nat hook postrouting priority srcnat - 10
		ct state established,related accept
		fib daddr type local accept
		ip daddr @exempt4 accept
		ip6 daddr @exempt6 accept
		masquerade
	}
}
`
	prefixes := func(i int) string { return fmt.Sprintf("%s, %s", n.subnets[i], other.subnets[i]) }
	text := fmt.Sprintf(rules, prefixes(0), prefixes(1))
	return errors.Join(joinByRoutes(n, other), restore(n.Namespace, text, "nft", "-f", "-"))
}

// flannelBridge is the configuration of the bridge plugin that flannel writes.
func flannelBridge() []plugin {
	return []plugin{{"type": "bridge", "isGateway": true, "hairpinMode": true, "mtu": flannelMTU[1]}}
}

// flannelMTU is the MTU of flannel's device of each family.
var flannelMTU = [2]int{linkMTU - 50, linkMTU - 70}

// joinAsFlannel adds a VXLAN device for each family, and for the other node a route, a neighbor and an entry in the
// forwarding database; and rules that do not masquerade between nodes.
func joinAsFlannel(n, other node) error {
	for i := range n.addrs {
		if err := n.addFlannel(i, other); err != nil {
			return err
		}
	}
	return errors.Join(
		restore(n.Namespace, flannelRules(clusterSubnets[0], n.subnets[0], "224.0.0.0/4"), "iptables-restore", "--noflush"),
		restore(n.Namespace, flannelRules(clusterSubnets[1], n.subnets[1], "ff00::/8"), "ip6tables-restore", "--noflush"),
	)
}

func (n node) addFlannel(family int, other node) error {
	uplink, err := n.Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = [2]string{"flannel.1", "flannel-v6.1"}[family], flannelMTU[family], n.mac(family)
	vxlan := &netlink.Vxlan{
		LinkAttrs: attrs, VxlanId: 1, Port: 8472, VtepDevIndex: uplink.Attrs().Index, SrcAddr: n.addrs[family].AsSlice(),
	}
	if err := n.Netlink().LinkAdd(vxlan); err != nil {
		return fmt.Errorf("add a VXLAN device: %w", err)
	}
	device, err := n.Netlink().LinkByName(attrs.Name)
	if err != nil {
		return err
	}
	own, gateway, subnet := n.subnets[family].Addr(), other.subnets[family].Addr(), other.subnets[family]
	addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(own, own.BitLen()))}
	if own.Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	if err := errors.Join(n.Netlink().AddrAdd(device, addr), n.Netlink().LinkSetUp(device)); err != nil {
		return fmt.Errorf("configure %s: %w", attrs.Name, err)
	}
	index, mac := device.Attrs().Index, other.mac(family)
	if err := errors.Join(
		n.Netlink().NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: gateway.AsSlice(), HardwareAddr: mac}),
		n.Netlink().NeighSet(&netlink.Neigh{
			LinkIndex: index, State: netlink.NUD_PERMANENT, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, IP: other.addrs[family].AsSlice(), HardwareAddr: mac,
		}),
		n.Netlink().RouteReplace(&netlink.Route{LinkIndex: index, Dst: ipNet(subnet), Gw: gateway.AsSlice(), Flags: int(netlink.FLAG_ONLINK)}),
	); err != nil {
		return fmt.Errorf("lead to %s: %w", subnet, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func flannelRules(cluster, own netip.Prefix, multicast string) string {
	return strings.NewReplacer("CLUSTER", cluster.String(), "OWN", own.String(), "MULTICAST", multicast).Replace(`*filter
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s CLUSTER -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d CLUSTER -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
*nat
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
-A FLANNEL-POSTRTG -s OWN -d CLUSTER -j RETURN
-A FLANNEL-POSTRTG -s CLUSTER -d OWN -j RETURN
-A FLANNEL-POSTRTG ! -s CLUSTER -d OWN -j RETURN
-A FLANNEL-POSTRTG -s CLUSTER ! -d MULTICAST -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s CLUSTER -d CLUSTER -j MASQUERADE --random-fully
COMMIT
`)
}
