package reconcile

import (
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// Filter selects the changes of this host that require a sync. A host whose containers come and go has hundreds of other
// changes each second.
type Filter struct {
	Tunnel   int            // index of the tunnel device
	PodCIDRs []netip.Prefix // of this node: their addresses are on containers' devices
}

// IsRelevant reports whether a change may concern the tunnel device, an external device, or our routes.
func (f Filter) IsRelevant(m rtnl.Message) bool {
	switch m.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		return len(m.Data) >= unix.SizeofIfInfomsg && !isContainers(m.Data)
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		return len(m.Data) >= unix.SizeofIfAddrmsg && f.isRelevantAddress(m.Data)
	case unix.RTM_DELROUTE: // new routes are ours, or do not matter
		return len(m.Data) >= unix.SizeofRtMsg && nl.DeserializeRtMsg(m.Data).Protocol == protocol
	default:
		return false
	}
}

// isContainers reports whether a device is the host's end of a container's interface, by name and kind.
func isContainers(data []byte) bool {
	attrs, err := nl.ParseRouteAttr(data[unix.SizeofIfInfomsg:])
	if err != nil {
		return false
	}
	var name, kind string
	for _, attr := range attrs {
		switch attr.Attr.Type {
		case unix.IFLA_IFNAME:
			name = unix.ByteSliceToString(attr.Value)
		case unix.IFLA_LINKINFO:
			kind = kindOf(attr.Value)
		}
	}
	return names.IsHostDevice(name) && (kind == "veth" || kind == "netkit")
}

func kindOf(info []byte) string {
	attrs, _ := nl.ParseRouteAttr(info)
	for _, attr := range attrs {
		if attr.Attr.Type == nl.IFLA_INFO_KIND {
			return unix.ByteSliceToString(attr.Value)
		}
	}
	return ""
}

func (f Filter) isRelevantAddress(data []byte) bool {
	header := nl.DeserializeIfAddrmsg(data)
	if int(header.Index) == f.Tunnel {
		return true
	}
	attrs, err := nl.ParseRouteAttr(data[unix.SizeofIfAddrmsg:])
	if err != nil {
		return true
	}
	for _, attr := range attrs {
		if attr.Attr.Type != unix.IFA_ADDRESS {
			continue
		}
		addr, _ := netip.AddrFromSlice(attr.Value)
		return !addr.IsLinkLocalUnicast() &&
			!slices.ContainsFunc(f.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
	}
	return true
}
