package trace

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
)

// Offsets and sizes in a frame without options.
const (
	etherLen = 14
	ipv4Len  = 20
	ipv6Len  = 40
	echoLen  = 8
	payload  = "ebpfnetctl trace"
)

// Flags of a TCP segment.
const (
	tcpSYN byte = 2
	tcpACK byte = 16
)

// packet is a packet that trace makes. Of an echo message, the requesting side has the identifier as its port, and the
// other one none, as in the maps.
type packet struct {
	protocol maps.Protocol
	src, dst netip.AddrPort
	isReply  bool
	isKnown  bool // of a connection that the datapath knows
	frame    []byte
}

func (p packet) isEcho() bool { return p.protocol != maps.TCP && p.protocol != maps.UDP }

// build makes the frame. Nobody looks at the checksums.
func (p *packet) build(from, to net.HardwareAddr) {
	l4 := p.l4()
	b := append(append(make([]byte, 0, 128), to...), from...)
	if p.src.Addr().Is4() {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(ipv4Len+len(l4)))
		b = append(b, 0, 0, 0x40, 0, 64, byte(p.protocol), 0, 0) // don't fragment, TTL 64
	} else {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
		b = append(b, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(len(l4)))
		b = append(b, byte(p.protocol), 64)
	}
	b = append(b, p.src.Addr().AsSlice()...)
	b = append(b, p.dst.Addr().AsSlice()...)
	p.frame = append(b, l4...)
}

// l4 returns the header after that of IP, and the payload.
func (p *packet) l4() []byte {
	const window = 0xffff

	if p.isEcho() {
		b := binary.BigEndian.AppendUint32(nil, uint32(echoType(p.protocol, p.isReply))<<24|1) // the checksum is not 0
		b = binary.BigEndian.AppendUint32(b, uint32(p.src.Port()|p.dst.Port())<<16)
		return append(b, payload...)
	}
	b := binary.BigEndian.AppendUint16(nil, p.src.Port())
	b = binary.BigEndian.AppendUint16(b, p.dst.Port())
	if p.protocol == maps.UDP {
		b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
		return append(append(b, 0, 1), payload...)
	}
	flags, acknowledged := tcpSYN, uint32(0)
	switch {
	case p.isKnown:
		flags, acknowledged = tcpACK, 1001
	case p.isReply:
		flags, acknowledged = tcpSYN|tcpACK, 1001
	}
	b = binary.BigEndian.AppendUint32(b, 1000)
	b = binary.BigEndian.AppendUint32(b, acknowledged)
	b = append(b, 5<<4, flags)
	return append(binary.BigEndian.AppendUint16(b, window), 0, 1, 0, 0)
}

func echoType(protocol maps.Protocol, isReply bool) byte {
	switch {
	case protocol == maps.ICMP && isReply:
		return 0
	case protocol == maps.ICMP:
		return 8
	case isReply:
		return 129
	default:
		return 128
	}
}

// after returns the packet as a program has left its frame.
func (p packet) after(frame []byte) (packet, error) {
	header, addrs, size := ipv6Len, 8, 16
	if p.src.Addr().Is4() {
		header, addrs, size = ipv4Len, 12, 4
	}
	if len(frame) < etherLen+header+echoLen {
		return p, errors.New("a program has cut the packet short")
	}
	ip := frame[etherLen:]
	l4 := ip[header:]
	src, _ := netip.AddrFromSlice(ip[addrs : addrs+size])
	dst, _ := netip.AddrFromSlice(ip[addrs+size : addrs+2*size])
	sport, dport := binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	if p.isEcho() {
		sport, dport = binary.BigEndian.Uint16(l4[4:]), 0
		if p.isReply {
			sport, dport = dport, sport
		}
	}
	p.src, p.dst, p.frame = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport), frame
	return p, nil
}

// reply returns what the receiver of p replies.
func (p packet) reply() packet {
	return packet{protocol: p.protocol, src: p.dst, dst: p.src, isReply: true, isKnown: p.isKnown}
}

func (p packet) String() string { return maps.AddrPortText(p.src) + " > " + maps.AddrPortText(p.dst) }
