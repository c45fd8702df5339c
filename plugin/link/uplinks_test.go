package link

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestCouldFaceOut(t *testing.T) {
	named := func(name string) netlink.LinkAttrs { return netlink.LinkAttrs{Name: name} }
	port := netlink.LinkAttrs{Name: "eth1", MasterIndex: 7}
	for _, tc := range []struct {
		device netlink.Link
		want   bool
	}{
		{&netlink.Device{LinkAttrs: named("enp1s0")}, true},
		{&netlink.Device{LinkAttrs: port}, false},
		{&netlink.Vlan{LinkAttrs: named("enp1s0.5")}, true},
		{&netlink.Bond{LinkAttrs: named("bond0")}, true},
		{&netlink.Bridge{LinkAttrs: named("br0")}, true},
		{&netlink.Wireguard{LinkAttrs: named("wg0")}, true},
		{&netlink.Tuntap{LinkAttrs: named("tun0")}, true},
		{&netlink.Tuntap{LinkAttrs: port}, false},
		{&netlink.GenericLink{LinkAttrs: named("ppp0"), LinkType: "ppp"}, true},
		{&netlink.Macvlan{LinkAttrs: named("wan0")}, true},
		{&netlink.Macvtap{Macvlan: netlink.Macvlan{LinkAttrs: named("macvtap0")}}, false},
		{&netlink.Sittun{LinkAttrs: named("he-ipv6")}, true},
		{&netlink.Sittun{LinkAttrs: named("sit0")}, false},
		{&netlink.Iptun{LinkAttrs: named("tunl0")}, false},
		{&netlink.Veth{LinkAttrs: named("cali4f1a")}, false},
		{&netlink.Veth{LinkAttrs: named("ebpf4f1a")}, false},
		{&netlink.Veth{LinkAttrs: named("eth1")}, true},
		{&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth1", Flags: net.FlagUp}}, false},
		{&netlink.Veth{LinkAttrs: port}, false},
		{&netlink.Netkit{LinkAttrs: named("lxc4f1a")}, false},
		{&netlink.Dummy{LinkAttrs: named("kube-ipvs0")}, false},
		{&netlink.Ifb{LinkAttrs: named("ifb0")}, false},
		{&netlink.Vrf{LinkAttrs: named("vrf-blue")}, false},
	} {
		if got := couldFaceOut(tc.device); got != tc.want {
			t.Errorf("%s %s, master %d: got %v, want %v", tc.device.Type(), tc.device.Attrs().Name, tc.device.Attrs().MasterIndex, got, tc.want)
		}
	}
}
