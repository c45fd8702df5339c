package drops

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
)

// packet has the addresses of a packet, and the ports if its protocol has some.
type packet struct {
	protocol string
	number   maps.Protocol
	src, dst netip.AddrPort
	hasPorts bool
	isError  bool // of ICMP
}

// parse reads the header of an EtherType. Fields that are cut off or unknown stay empty.
func parse(etherType uint16, header []byte) packet {
	switch {
	case etherType == unix.ETH_P_IP && len(header) >= 20:
		p := between(header[12:16], header[16:20])
		isFirst := binary.BigEndian.Uint16(header[6:])&0x1fff == 0
		p.addTransport(header[9], header[min(int(header[0]&15)*4, len(header)):], isFirst)
		return p
	case etherType == unix.ETH_P_IPV6 && len(header) >= 40:
		p := between(header[8:24], header[24:40])
		protocol, rest, isFirst := skipExtensions(header[6], header[40:])
		p.addTransport(protocol, rest, isFirst)
		return p
	case etherType == unix.ETH_P_ARP && len(header) >= 28:
		p := between(header[14:18], header[24:28])
		p.protocol = "arp"
		return p
	default:
		return packet{protocol: fmt.Sprintf("ethertype 0x%04x", etherType)}
	}
}

func between(src, dst []byte) packet {
	from, _ := netip.AddrFromSlice(src) // 4 or 16 bytes
	to, _ := netip.AddrFromSlice(dst)
	return packet{src: netip.AddrPortFrom(from, 0), dst: netip.AddrPortFrom(to, 0)}
}

// skipExtensions skips IPv6's extension headers. isFirst is false for later fragments, which have no transport
// header.
func skipExtensions(next uint8, header []byte) (protocol uint8, rest []byte, isFirst bool) {
	isFirst = true
	for len(header) >= 8 {
		length := 8
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			length += int(header[1]) * 8
		case unix.IPPROTO_FRAGMENT:
			isFirst = binary.BigEndian.Uint16(header[2:])&^7 == 0
		default:
			return next, header, isFirst
		}
		next, header = header[0], header[min(length, len(header)):]
	}
	return next, header, isFirst
}

// addTransport adds the protocol and its ports.
func (p *packet) addTransport(protocol uint8, header []byte, isFirst bool) {
	p.number = maps.Protocol(protocol)
	p.protocol = p.number.String()
	switch protocol {
	case unix.IPPROTO_ICMP:
		p.isError = isFirst && len(header) > 0 && slices.Contains([]byte{3, 4, 5, 11, 12}, header[0])
	case unix.IPPROTO_ICMPV6:
		p.isError = isFirst && len(header) > 0 && header[0] < 128
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		if isFirst && len(header) >= 4 {
			p.hasPorts = true
			p.src = netip.AddrPortFrom(p.src.Addr(), binary.BigEndian.Uint16(header))
			p.dst = netip.AddrPortFrom(p.dst.Addr(), binary.BigEndian.Uint16(header[2:]))
		}
	}
}

// side is an address with its port, if it has one.
func (p packet) side(side netip.AddrPort) string {
	switch {
	case !side.Addr().IsValid():
		return ""
	case p.hasPorts:
		return side.String()
	default:
		return side.Addr().String()
	}
}
