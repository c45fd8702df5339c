package rtnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

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

// TrackedConnections calls use with each connection that conntrack knows in the calling thread's network namespace: there may be
// too many for a list. It fails if the kernel lacks conntrack's netlink (nf_conntrack_netlink).
func TrackedConnections(use func(Tracked)) error {
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
		err := request.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
			if tracked, ok := trackedOf(message[nl.SizeofNfgenmsg:]); ok {
				use(tracked)
			}
			return true
		})
		if err != nil {
			return fmt.Errorf("list conntrack's connections: %w", explain(err))
		}
	}
	return nil
}

// trackedOf returns an entry, and whether it is one of TCP or UDP.
func trackedOf(entry []byte) (t Tracked, ok bool) {
	attributes := attributesOf(entry)
	t.Protocol, t.Opener, t.Asked = tupleOf(attributes[nl.CTA_TUPLE_ORIG])
	_, t.Server, t.Client = tupleOf(attributes[nl.CTA_TUPLE_REPLY])
	return t, t.Protocol == unix.IPPROTO_TCP || t.Protocol == unix.IPPROTO_UDP
}

// tupleOf returns zeros for what is missing.
func tupleOf(tuple []byte) (protocol uint8, source, destination netip.AddrPort) {
	parts := attributesOf(tuple)
	ip, proto := attributesOf(parts[nl.CTA_TUPLE_IP]), attributesOf(parts[nl.CTA_TUPLE_PROTO])
	side := func(addr4, addr6, port []byte) netip.AddrPort {
		addr, _ := netip.AddrFromSlice(slices.Concat(addr4, addr6))
		return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(append(port, 0, 0)))
	}
	source = side(ip[nl.CTA_IP_V4_SRC], ip[nl.CTA_IP_V6_SRC], proto[nl.CTA_PROTO_SRC_PORT])
	destination = side(ip[nl.CTA_IP_V4_DST], ip[nl.CTA_IP_V6_DST], proto[nl.CTA_PROTO_DST_PORT])
	return append(proto[nl.CTA_PROTO_NUM], 0)[0], source, destination
}

// attributesOf returns the values of the attributes of the first few types.
func attributesOf(nested []byte) (values [8][]byte) {
	for len(nested) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(nested))
		if size < unix.SizeofNlAttr || size > len(nested) {
			break
		}
		if kind := binary.NativeEndian.Uint16(nested[2:]) & nl.NLA_TYPE_MASK; int(kind) < len(values) {
			values[kind] = slices.Clip(nested[unix.SizeofNlAttr:size])
		}
		nested = nested[min(len(nested), (size+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)):]
	}
	return values
}
