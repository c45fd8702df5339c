package trace

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Offsets and sizes in a frame without options.
const (
	etherLen  = 14
	ipv4Len   = 20
	ipv6Len   = 40
	tcpLen    = 20
	udpLen    = 8
	echoLen   = 8
	firstTTL  = 64
	payload   = "ebpfnetctl trace"
	etherType = 12
)

// Flags of a TCP segment.
const (
	tcpFIN byte = 1
	tcpSYN byte = 2
	tcpRST byte = 4
	tcpACK byte = 16
)

// packet is a made packet. Of an echo message, the requesting side has the identifier as its port, and the other
// one none, as in the maps.
type packet struct {
	protocol maps.Protocol
	src, dst netip.AddrPort
	ttl      byte
	isReply  bool
	tcpFlags byte
	frame    []byte
}

// build makes the frame.
func (p *packet) build(from, to net.HardwareAddr) {
	p.frame = make([]byte, etherLen, 128)
	copy(p.frame, to)
	copy(p.frame[6:], from)
	l4 := p.l4()
	if p.src.Addr().Is4() {
		binary.BigEndian.PutUint16(p.frame[etherType:], unix.ETH_P_IP)
		ip := make([]byte, ipv4Len)
		ip[0], ip[8], ip[9] = 0x45, p.ttl, byte(p.protocol)
		binary.BigEndian.PutUint16(ip[2:], uint16(ipv4Len+len(l4)))
		binary.BigEndian.PutUint16(ip[6:], 0x4000) // don't fragment
		copy(ip[12:], p.src.Addr().AsSlice())
		copy(ip[16:], p.dst.Addr().AsSlice())
		binary.BigEndian.PutUint16(ip[10:], checksum(ip))
		p.frame = append(p.frame, ip...)
	} else {
		binary.BigEndian.PutUint16(p.frame[etherType:], unix.ETH_P_IPV6)
		ip := make([]byte, ipv6Len)
		ip[0], ip[6], ip[7] = 0x60, byte(p.protocol), p.ttl
		binary.BigEndian.PutUint16(ip[4:], uint16(len(l4)))
		copy(ip[8:], p.src.Addr().AsSlice())
		copy(ip[24:], p.dst.Addr().AsSlice())
		p.frame = append(p.frame, ip...)
	}
	p.frame = append(p.frame, l4...)
}

// l4 returns the header behind that of IP, and what follows.
func (p *packet) l4() []byte {
	var b []byte
	sum := 0
	switch p.protocol {
	case maps.TCP:
		b, sum = make([]byte, tcpLen), 16
		binary.BigEndian.PutUint32(b[4:], 1000)
		if p.tcpFlags&tcpACK != 0 {
			binary.BigEndian.PutUint32(b[8:], 1001)
		}
		b[12], b[13] = tcpLen/4<<4, p.tcpFlags
		binary.BigEndian.PutUint16(b[14:], 65535)
	case maps.UDP:
		b, sum = append(make([]byte, udpLen), payload...), 6
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
	default:
		b, sum = append(make([]byte, echoLen), payload...), 2
		b[0] = echoType(p.protocol, p.isReply)
		binary.BigEndian.PutUint16(b[4:], p.src.Port()|p.dst.Port())
	}
	if p.protocol == maps.TCP || p.protocol == maps.UDP {
		binary.BigEndian.PutUint16(b, p.src.Port())
		binary.BigEndian.PutUint16(b[2:], p.dst.Port())
	}
	covered := b
	if p.protocol != maps.ICMP {
		covered = append(p.pseudoHeader(len(b)), b...)
	}
	binary.BigEndian.PutUint16(b[sum:], checksum(covered))
	return b
}

func (p *packet) pseudoHeader(length int) []byte {
	b := append(p.src.Addr().AsSlice(), p.dst.Addr().AsSlice()...)
	return append(b, 0, byte(p.protocol), byte(length>>8), byte(length))
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

// checksum is that of the Internet (RFC 1071).
func checksum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 != 0 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// after returns the packet as a program has left its frame.
func (p packet) after(frame []byte) (packet, error) {
	is4 := p.src.Addr().Is4()
	header, addrs, size, ttl := ipv6Len, 8, 16, 7
	if is4 {
		header, addrs, size, ttl = ipv4Len, 12, 4, 8
	}
	if len(frame) < etherLen+header+echoLen {
		return p, errors.New("a program has cut the packet short")
	}
	ip := frame[etherLen:]
	l4 := ip[header:]
	src, _ := netip.AddrFromSlice(ip[addrs : addrs+size])
	dst, _ := netip.AddrFromSlice(ip[addrs+size : addrs+2*size])
	sport, dport := binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	if p.protocol != maps.TCP && p.protocol != maps.UDP {
		sport, dport = binary.BigEndian.Uint16(l4[4:]), 0
		if p.isReply {
			sport, dport = dport, sport
		}
	}
	p.src, p.dst, p.ttl, p.frame = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport), ip[ttl], frame
	return p, nil
}

// forwarded returns the packet as a router sends it.
func (p packet) forwarded(from, to net.HardwareAddr) packet {
	p.ttl--
	p.build(from, to)
	return p
}

// reply returns what the receiver of p replies.
func (p packet) reply() packet {
	r := packet{protocol: p.protocol, src: p.dst, dst: p.src, ttl: firstTTL, isReply: true}
	if p.protocol == maps.TCP {
		r.tcpFlags = tcpACK | p.tcpFlags&tcpSYN
	}
	return r
}

func (p packet) destinationMAC() net.HardwareAddr { return net.HardwareAddr(p.frame[:6]) }

// to returns the packet as a hook receives it.
func (p packet) to(device, ingress int, tag uint32) loader.Packet {
	return loader.Packet{Frame: p.frame, Device: device, Ingress: ingress, Tag: tag}
}

func (p packet) String() string { return maps.AddrPortText(p.src) + " > " + maps.AddrPortText(p.dst) }

// parse reads the frame of a real packet of TCP, UDP or ICMP echo, without options.
func parse(frame []byte) (p packet, ok bool) {
	if len(frame) < etherLen+ipv4Len+echoLen {
		return p, false
	}
	ip, header := frame[etherLen:], ipv4Len
	any4, any6 := netip.AddrPortFrom(netip.IPv4Unspecified(), 0), netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	switch etherTypeOf := binary.BigEndian.Uint16(frame[etherType:]); {
	case etherTypeOf == unix.ETH_P_IP && ip[0] == 0x45 && binary.BigEndian.Uint16(ip[6:])&0x3fff == 0: // no fragment
		p.protocol, p.src = maps.Protocol(ip[9]), any4
	case etherTypeOf == unix.ETH_P_IPV6 && len(ip) >= ipv6Len+echoLen:
		p.protocol, p.src, header = maps.Protocol(ip[6]), any6, ipv6Len
	default:
		return p, false
	}
	l4 := ip[header:]
	switch p.protocol {
	case maps.TCP:
		if len(l4) < tcpLen {
			return p, false
		}
		p.tcpFlags = l4[13]
	case maps.UDP:
	case maps.ICMP, maps.ICMPv6:
		p.isReply = l4[0] == echoType(p.protocol, true)
		if !p.isReply && l4[0] != echoType(p.protocol, false) {
			return p, false
		}
	default:
		return p, false
	}
	p, err := p.after(frame)
	return p, err == nil
}

// flagsText names the flags of a TCP segment.
func flagsText(p packet) string {
	var names []string
	for _, f := range []struct {
		flag byte
		name string
	}{{tcpSYN, "SYN"}, {tcpFIN, "FIN"}, {tcpRST, "RST"}, {tcpACK, "ACK"}} {
		if p.tcpFlags&f.flag != 0 {
			names = append(names, f.name)
		}
	}
	return strings.Join(names, ",")
}
