package reconcile

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// message returns what the kernel sends: a header and attributes.
func message(kind uint16, header nl.NetlinkRequestData, attrs ...*nl.RtAttr) rtnl.Message {
	data := slices.Clone(header.Serialize())
	for _, attr := range attrs {
		data = append(data, attr.Serialize()...)
	}
	return rtnl.Message{Type: kind, Data: data}
}

// TestIsRelevant wakes for what is ours or leads outside, and not for containers that come and go.
func TestIsRelevant(t *testing.T) {
	filter := Filter{Tunnel: tunnelIndex, PodCIDRs: []netip.Prefix{podCIDR(1), netip.MustParsePrefix("fd44:1::/64")}}
	link := func(kind uint16, name, device string) rtnl.Message {
		info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
		info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated(device))
		return message(kind, nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)), info)
	}
	addr := func(kind uint16, index uint32, text string) rtnl.Message {
		addr := netip.MustParseAddr(text)
		header := nl.NewIfAddrmsg(unix.AF_INET)
		header.Index = index
		return message(kind, header, nl.NewRtAttr(unix.IFA_ADDRESS, addr.AsSlice()))
	}
	route := func(kind uint16, protocol uint8) rtnl.Message {
		return message(kind, &nl.RtMsg{RtMsg: unix.RtMsg{Family: unix.AF_INET, Protocol: protocol}})
	}
	for _, test := range []struct {
		name    string
		message rtnl.Message
		want    bool
	}{
		{"tunnel deleted", link(unix.RTM_DELLINK, "ebpfnet0", "vxlan"), true},
		{"NIC down", link(unix.RTM_NEWLINK, "eth0", "veth"), true},
		{"container added", link(unix.RTM_NEWLINK, "ebpf0123456789a", "veth"), false},
		{"container removed", link(unix.RTM_DELLINK, "ebpf0123456789a", "netkit"), false},
		{"another kind with such a name", link(unix.RTM_NEWLINK, "ebpf0123456789a", "bond"), true},
		{"a shorter name of such a kind", link(unix.RTM_NEWLINK, "ebpf0", "veth"), true},
		{"gateway of the tunnel", addr(unix.RTM_DELADDR, tunnelIndex, "10.244.1.1"), true},
		{"gateway of a container", addr(unix.RTM_NEWADDR, 77, "10.244.1.1"), false},
		{"IPv6 gateway of a container", addr(unix.RTM_NEWADDR, 77, "fd44:1::1"), false},
		{"link-local of a container", addr(unix.RTM_NEWADDR, 77, "fe80::1"), false},
		{"address of a NIC", addr(unix.RTM_DELADDR, 2, "192.0.2.1"), true},
		{"our route deleted", route(unix.RTM_DELROUTE, protocol), true},
		{"our route added", route(unix.RTM_NEWROUTE, protocol), false},
		{"route of a container deleted", route(unix.RTM_DELROUTE, unix.RTPROT_BOOT), false},
		{"cut link", rtnl.Message{Type: unix.RTM_NEWLINK, Data: []byte{1}}, false},
		{"cut address", rtnl.Message{Type: unix.RTM_NEWADDR}, false},
		{"cut route", rtnl.Message{Type: unix.RTM_DELROUTE}, false},
		{"rule", rtnl.Message{Type: unix.RTM_NEWRULE}, false},
	} {
		if got := filter.IsRelevant(test.message); got != test.want {
			t.Errorf("%s: got %v, want %v", test.name, got, test.want)
		}
	}
}
