package testenv

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"

	"golang.org/x/sys/unix"
)

// MAC is a hardware address that can be compared.
type MAC [6]byte

func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// TCP flags, as in the header.
const (
	FIN uint8 = 1 << iota
	SYN
	RST
	PSH
	ACK
	URG
)

// Packet describes an Ethernet frame with IPv4 or IPv6. It is comparable: a test copies the input,
// changes some fields, and compares the copy with [Decode] of a program's output. Lengths and
// checksums are not part of it: [Packet.Build] computes and [VerifyChecksums] verifies them.
type Packet struct {
	SrcMAC, DstMAC MAC

	// Src and Dst have the family of the packet.
	Src, Dst netip.Addr
	// Proto is the protocol of the payload: unix.IPPROTO_TCP and the like.
	Proto uint8
	// TTL is the hop limit in IPv6.
	TTL uint8
	// TOS is the traffic class in IPv6.
	TOS       uint8
	FlowLabel uint32 // IPv6
	Options   string // IPv4, raw, a multiple of 4 bytes

	// IPID identifies fragments. In IPv6 it is in the fragment header, and 0 without one.
	IPID         uint32
	DontFragment bool // IPv4
	// Fragmented is true for fragments, and in IPv6 for every packet with a fragment
	// header. FragOffset is in bytes. Unless it is 0, the packet has no transport header:
	// everything after the IP header is Payload.
	Fragmented    bool
	FragOffset    uint16
	MoreFragments bool

	// TCP and UDP.
	SrcPort, DstPort uint16
	// NoChecksum is a UDP checksum of 0.
	NoChecksum bool

	// TCP. Options are not supported.
	Seq, Ack uint32
	TCPFlags uint8
	Window   uint16

	// ICMP and ICMPv6.
	Type, Code uint8
	// ID and EchoSeq are those of echo requests and replies.
	ID, EchoSeq uint16
	// Rest is the second word of the header of other types, such as the MTU.
	Rest uint32

	// Payload follows the last header above. An ICMP error quotes a packet, starting with
	// its IP header: see [DecodeIP].
	Payload string
}

// Addresses of the packets that the constructors below return.
var (
	defaultSrcMAC = MAC{2, 0, 0, 0, 0, 1}
	defaultDstMAC = MAC{2, 0, 0, 0, 0, 2}
)

func newPacket(proto uint8, src, dst netip.Addr) Packet {
	return Packet{SrcMAC: defaultSrcMAC, DstMAC: defaultDstMAC, Src: src, Dst: dst, Proto: proto, TTL: 64}
}

// TCPPacket returns a TCP segment with a TTL of 64 and locally administered MACs.
func TCPPacket(src, dst netip.AddrPort, flags uint8, payload string) Packet {
	p := newPacket(unix.IPPROTO_TCP, src.Addr(), dst.Addr())
	p.SrcPort, p.DstPort = src.Port(), dst.Port()
	p.Seq, p.TCPFlags, p.Window, p.Payload = 1000, flags, 0xffff, payload
	return p
}

// UDPPacket returns a UDP datagram with a TTL of 64 and locally administered MACs.
func UDPPacket(src, dst netip.AddrPort, payload string) Packet {
	p := newPacket(unix.IPPROTO_UDP, src.Addr(), dst.Addr())
	p.SrcPort, p.DstPort, p.Payload = src.Port(), dst.Port(), payload
	return p
}

// EchoPacket returns an echo request or reply, of ICMP or ICMPv6 depending on the addresses.
func EchoPacket(src, dst netip.Addr, reply bool, id, seq uint16, payload string) Packet {
	p := newPacket(unix.IPPROTO_ICMP, src, dst)
	p.Type = icmpEcho
	if src.Is6() {
		p.Proto, p.Type = unix.IPPROTO_ICMPV6, icmp6Echo
	}
	if reply {
		p.Type = icmpEchoReply
		if src.Is6() {
			p.Type = icmp6EchoReply
		}
	}
	p.ID, p.EchoSeq, p.Payload = id, seq, payload
	return p
}

// ICMPErrorPacket returns the error that the host at src sends to the source of a frame. It quotes
// the IP packet in the frame, at most limit bytes of it unless limit is 0. rest is the second word
// of the header, such as the MTU.
func ICMPErrorPacket(src netip.Addr, frame []byte, typ, code uint8, rest uint32, limit int) (Packet, error) {
	quoted, err := Decode(frame)
	if err != nil {
		return Packet{}, fmt.Errorf("packet to quote: %w", err)
	}
	quote := frame[etherLen:]
	if limit > 0 && limit < len(quote) {
		quote = quote[:limit]
	}
	p := newPacket(unix.IPPROTO_ICMP, src, quoted.Src)
	if quoted.Src.Is6() {
		p.Proto = unix.IPPROTO_ICMPV6
	}
	p.Type, p.Code, p.Rest, p.Payload = typ, code, rest, string(quote)
	return p, nil
}

const (
	icmpEchoReply  = 0
	icmpEcho       = 8
	icmp6Echo      = 128
	icmp6EchoReply = 129
)

// isEcho reports whether the packet is an ICMP or ICMPv6 echo request or reply.
func (p Packet) isEcho() bool {
	switch p.Proto {
	case unix.IPPROTO_ICMP:
		return p.Type == icmpEcho || p.Type == icmpEchoReply
	case unix.IPPROTO_ICMPV6:
		return p.Type == icmp6Echo || p.Type == icmp6EchoReply
	}
	return false
}

// Diff lists the fields in which two packets differ, one per line. It is empty if they are equal.
func Diff(got, want Packet) string {
	var lines strings.Builder
	g, w := reflect.ValueOf(got), reflect.ValueOf(want)
	for i := range g.NumField() {
		if !g.Field(i).Equal(w.Field(i)) {
			fmt.Fprintf(&lines, "%s: got %s, want %s\n", g.Type().Field(i).Name,
				format(g.Field(i).Interface()), format(w.Field(i).Interface()))
		}
	}
	return lines.String()
}

// String lists the nonzero fields.
func (p Packet) String() string {
	var fields []string
	v := reflect.ValueOf(p)
	for i := range v.NumField() {
		if !v.Field(i).IsZero() {
			fields = append(fields, v.Type().Field(i).Name+"="+format(v.Field(i).Interface()))
		}
	}
	return strings.Join(fields, " ")
}

func format(value any) string {
	if s, ok := value.(string); ok {
		if len(s) > 32 {
			return fmt.Sprintf("%d bytes %q...", len(s), s[:32])
		}
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprint(value)
}
