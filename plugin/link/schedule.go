package link

import (
	"errors"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// schedule sets the queue of packets that wait for the token bucket: fq_codel, which has a queue for each connection,
// so that one that sends little does not wait for one that sends much. Without fq_codel in the kernel, there are two
// short queues; the first one is for small packets of protocols other than TCP, such as DNS.
func schedule(handle *netlink.Handle, device netlink.Link, limit Limit) error {
	rate, frame, _ := sizes(device, limit)
	fair := netlink.NewFqCodel(attrsOf(device, 0, bucketClass))
	fair.ECN = 1
	fair.Target = uint32(max(queueTime*1000, 2*frame*1e6/rate)) // microseconds
	fair.Interval = max(100_000, 2*fair.Target)
	err := handle.QdiscReplace(fair)
	if errors.Is(err, unix.ENOENT) {
		return smallFirst(handle, device, limit)
	}
	return err
}

// Handles of the two queues, which are served in this order, and of the htb above them.
const (
	queuesMajor = 0xed
	firstMajor  = 0xee // of the first queue; the second has the next number
	queues      = 2
	firstClass  = 1
)

func smallFirst(handle *netlink.Handle, device netlink.Link, limit Limit) error {
	htb := netlink.NewHtb(attrsOf(device, netlink.MakeHandle(queuesMajor, 0), bucketClass))
	htb.Defcls = queues
	err := addHtb(handle, device, htb)
	if errors.Is(err, unix.ENOENT) {
		return nil // no htb either: packets wait in the bucket's own queue
	}
	if err != nil {
		return err
	}
	for i := range uint16(queues) {
		class := netlink.ClassAttrs{LinkIndex: htb.LinkIndex, Parent: htb.Handle, Handle: netlink.MakeHandle(queuesMajor, firstClass+i)}
		err := handle.ClassReplace(netlink.NewHtbClass(class, netlink.HtbClassAttrs{
			Rate: unlimited, Buffer: unlimitedBurst, Cbuffer: unlimitedBurst, Quantum: largestSegment, Prio: uint32(i),
		}))
		if err != nil {
			return err
		}
		if err := handle.QdiscReplace(queue(device, limit, firstMajor+i, class.Handle)); err != nil {
			return err
		}
	}
	return addSmall(handle, device, htb.Handle)
}

// addHtb adds an htb unless it exists: unlike other qdiscs, an htb cannot be replaced.
func addHtb(handle *netlink.Handle, device netlink.Link, htb *netlink.Htb) error {
	present, err := rtnl.Qdiscs(handle, device)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(present, func(q netlink.Qdisc) bool { return q.Attrs().Handle == htb.Handle }) {
		return nil
	}
	return handle.QdiscReplace(htb)
}

// Parameters of an unlimited class or queue.
const (
	unlimited      = 100e9 // bits per second
	unlimitedBurst = 1 << 20
)

// queue returns a queue limited in bytes. It is a token bucket that is never empty, because the netlink library has no
// bfifo.
func queue(device netlink.Link, limit Limit, major uint16, parent uint32) *netlink.Tbf {
	rate, frame, _ := sizes(device, limit)
	return &netlink.Tbf{
		QdiscAttrs: attrsOf(device, netlink.MakeHandle(major, 0), parent),
		Rate:       unlimited / 8,
		Buffer:     netlink.Xmittime(unlimited/8, 1<<30),
		Limit:      uint32(min(waiting(rate, frame), 1<<31)),
	}
}

// addSmall adds the filters that send small packets to the first queue, unless they exist. Small TCP packets stay in
// order with the rest of their connection.
func addSmall(handle *netlink.Handle, device netlink.Link, parent uint32) error {
	const (
		small4, small6 = 0x0000ff80, 0xff800000 // masks of the length: without these bits it is less than 128 bytes
		lengthAt4      = 0
		lengthAt6      = 4
		protocolAt4    = 8
		protocolAt6    = 4
		protocolByte4  = 16 // shift in the word at that offset
		protocolByte6  = 8
	)
	present, err := rtnl.Filters(handle, device, parent)
	if err != nil || len(present) > 0 {
		return err
	}
	var errs []error
	for i, packet := range []struct {
		etherType uint16
		length    netlink.TcU32Key
		protocol  netlink.TcU32Key
	}{
		{unix.ETH_P_IP, key(lengthAt4, small4, 0), key(protocolAt4, 0xff<<protocolByte4, unix.IPPROTO_ICMP<<protocolByte4)},
		{unix.ETH_P_IP, key(lengthAt4, small4, 0), key(protocolAt4, 0xff<<protocolByte4, unix.IPPROTO_UDP<<protocolByte4)},
		{unix.ETH_P_IPV6, key(lengthAt6, small6, 0), key(protocolAt6, 0xff<<protocolByte6, unix.IPPROTO_ICMPV6<<protocolByte6)},
		{unix.ETH_P_IPV6, key(lengthAt6, small6, 0), key(protocolAt6, 0xff<<protocolByte6, unix.IPPROTO_UDP<<protocolByte6)},
	} {
		errs = append(errs, handle.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: device.Attrs().Index, Parent: parent, Priority: uint16(i + 1), Protocol: packet.etherType,
			},
			ClassId: netlink.MakeHandle(queuesMajor, firstClass),
			Sel:     &netlink.TcU32Sel{Flags: nl.TC_U32_TERMINAL, Keys: []netlink.TcU32Key{packet.length, packet.protocol}},
		}))
	}
	return errors.Join(errs...)
}

func key(offset int32, mask, value uint32) netlink.TcU32Key {
	return netlink.TcU32Key{Off: offset, Mask: mask, Val: value}
}
