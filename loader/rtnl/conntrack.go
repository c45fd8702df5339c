package rtnl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// BeLiberal has conntrack accept any sequence numbers of TCP connections, as the kernel does for those that leave an
// nftables flowtable: packets are invalid if conntrack has not seen the ones before. It leaves out connections that
// conntrack does not know. It fails if the kernel lacks conntrack's netlink (nf_conntrack_netlink). The network
// namespace is the calling thread's.
func BeLiberal(ctx context.Context, connections [][2]netip.AddrPort) error {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return explain(err)
	}
	defer socket.Close()

	sockets := map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: socket}}
	for _, sides := range connections {
		request := liberalRequest(sides)
		request.Sockets = sockets
		_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
		if err = errors.Join(err, ctx.Err()); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("update conntrack's entry of %s and %s: %w", sides[0], sides[1], err)
		}
	}
	return nil
}

// liberalRequest changes only the flags of an entry. conntrack finds it by the tuple of either direction.
func liberalRequest(sides [2]netip.AddrPort) *nl.NetlinkRequest {
	const subsystem, beLiberal = unix.NFNL_SUBSYS_CTNETLINK << 8, 8 // IP_CT_TCP_FLAG_BE_LIBERAL

	nested := func(kind int, children ...*nl.RtAttr) *nl.RtAttr {
		attr := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
		for _, child := range children {
			attr.AddChild(child)
		}
		return attr
	}
	family, src, dst := unix.AF_INET, nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	if sides[0].Addr().Is6() {
		family, src, dst = unix.AF_INET6, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	flags := []byte{beLiberal, beLiberal} // and the mask
	request := nl.NewNetlinkRequest(subsystem|nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_ACK)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: uint8(family), Version: nl.NFNETLINK_V0})
	request.AddData(nested(nl.CTA_TUPLE_ORIG,
		nested(nl.CTA_TUPLE_IP,
			nl.NewRtAttr(src, sides[0].Addr().AsSlice()),
			nl.NewRtAttr(dst, sides[1].Addr().AsSlice())),
		nested(nl.CTA_TUPLE_PROTO,
			nl.NewRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_TCP}),
			nl.NewRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(sides[0].Port())),
			nl.NewRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(sides[1].Port())))))
	request.AddData(nested(nl.CTA_PROTOINFO, nested(nl.CTA_PROTOINFO_TCP,
		nl.NewRtAttr(nl.CTA_PROTOINFO_TCP_FLAGS_ORIGINAL, flags),
		nl.NewRtAttr(nl.CTA_PROTOINFO_TCP_FLAGS_REPLY, flags))))
	return request
}

// Tracked is a connection that conntrack knows, by TCP or UDP. The sides differ between the directions if the host
// translates it.
type Tracked struct {
	Protocol uint8
	// Opener has opened it to Asked. Server has answered, to Client.
	Opener, Asked, Server, Client netip.AddrPort
}

// TrackedConnections lists the connections that conntrack knows in the calling thread's network namespace. It fails if the
// kernel lacks conntrack's netlink (nf_conntrack_netlink).
func TrackedConnections() (list []Tracked, err error) {
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return nil, fmt.Errorf("list conntrack's connections: %w", explain(err))
		}
		for _, flow := range flows {
			sent, reply := flow.Forward, flow.Reverse
			if sent.Protocol == unix.IPPROTO_TCP || sent.Protocol == unix.IPPROTO_UDP {
				list = append(list, Tracked{sent.Protocol,
					sideOf(sent.SrcIP, sent.SrcPort), sideOf(sent.DstIP, sent.DstPort),
					sideOf(reply.SrcIP, reply.SrcPort), sideOf(reply.DstIP, reply.DstPort)})
			}
		}
	}
	return list, nil
}

func sideOf(ip net.IP, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr.Unmap(), port)
}
