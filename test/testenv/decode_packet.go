package testenv

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

// Decode parses a frame. It fails for frames that [Packet] cannot describe: other EtherTypes, other
// IPv6 extension headers, and truncated headers.
func Decode(frame []byte) (Packet, error) {
	var eth layers.Ethernet
	if err := eth.DecodeFromBytes(frame, gopacket.NilDecodeFeedback); err != nil {
		return Packet{}, fmt.Errorf("decode Ethernet: %w", err)
	}
	if eth.EthernetType != layers.EthernetTypeIPv4 && eth.EthernetType != layers.EthernetTypeIPv6 {
		return Packet{}, fmt.Errorf("decode frame: EtherType %s", eth.EthernetType)
	}
	p, err := DecodeIP(eth.Payload)
	if err != nil {
		return Packet{}, err
	}
	if p.Src.Is4() != (eth.EthernetType == layers.EthernetTypeIPv4) {
		return Packet{}, fmt.Errorf("decode frame: EtherType %s does not match the IP version", eth.EthernetType)
	}
	p.SrcMAC, p.DstMAC = MAC(eth.SrcMAC), MAC(eth.DstMAC)
	return p, nil
}

// DecodeIP is Decode for an IP packet without Ethernet header. The packet may be truncated as in an
// ICMP error: then Payload is truncated too. Missing fields of the transport header are 0; its first
// 8 bytes are required.
func DecodeIP(packet []byte) (Packet, error) {
	if len(packet) == 0 {
		return Packet{}, errors.New("decode IP: empty")
	}
	var (
		p   Packet
		l4  []byte
		err error
	)
	switch packet[0] >> 4 {
	case 4:
		l4, err = p.decodeIPv4(packet)
	case 6:
		l4, err = p.decodeIPv6(packet)
	default:
		err = fmt.Errorf("version %d", packet[0]>>4)
	}
	if err != nil {
		return Packet{}, fmt.Errorf("decode IP: %w", err)
	}
	if p.FragOffset != 0 {
		p.Payload = string(l4)
		return p, nil
	}
	if err := p.decodeTransport(l4); err != nil {
		return Packet{}, fmt.Errorf("decode IP protocol %d: %w", p.Proto, err)
	}
	return p, nil
}

func (p *Packet) decodeIPv4(packet []byte) ([]byte, error) {
	var ip layers.IPv4
	if err := ip.DecodeFromBytes(packet, gopacket.NilDecodeFeedback); err != nil {
		return nil, err
	}
	p.Src, p.Dst = address(ip.SrcIP), address(ip.DstIP)
	p.Proto, p.TTL, p.TOS, p.IPID = uint8(ip.Protocol), ip.TTL, ip.TOS, uint32(ip.Id)
	p.DontFragment = ip.Flags&layers.IPv4DontFragment != 0
	p.MoreFragments = ip.Flags&layers.IPv4MoreFragments != 0
	p.FragOffset = ip.FragOffset * 8
	p.Fragmented = p.MoreFragments || p.FragOffset != 0
	p.Options = string(ip.Contents[ipv4Len:])
	return ip.Payload, nil
}

func (p *Packet) decodeIPv6(packet []byte) ([]byte, error) {
	if len(packet) >= ipv6Len && binary.BigEndian.Uint16(packet[4:]) == 0 {
		// BIG TCP, which gopacket would reject as a broken jumbogram.
		packet = append([]byte(nil), packet...)
		binary.BigEndian.PutUint16(packet[4:], uint16(min(len(packet)-ipv6Len, 0xffff)))
	}
	var ip layers.IPv6
	if err := ip.DecodeFromBytes(packet, gopacket.NilDecodeFeedback); err != nil {
		return nil, err
	}
	p.Src, p.Dst = address(ip.SrcIP), address(ip.DstIP)
	p.Proto, p.TTL, p.TOS, p.FlowLabel = uint8(ip.NextHeader), ip.HopLimit, ip.TrafficClass, ip.FlowLabel
	payload := ip.Payload
	if ip.NextHeader == layers.IPProtocolIPv6Fragment {
		var fragment layers.IPv6Fragment
		if err := fragment.DecodeFromBytes(payload, gopacket.NilDecodeFeedback); err != nil {
			return nil, err
		}
		p.Proto, p.IPID, p.Fragmented = uint8(fragment.NextHeader), fragment.Identification, true
		p.FragOffset, p.MoreFragments = fragment.FragmentOffset*8, fragment.MoreFragments
		payload = fragment.Payload
	}
	switch p.Proto {
	case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS, unix.IPPROTO_FRAGMENT:
		return nil, fmt.Errorf("extension header %d", p.Proto)
	}
	return payload, nil
}

func (p *Packet) decodeTransport(l4 []byte) error {
	switch p.Proto {
	case unix.IPPROTO_TCP:
		return p.decodeTCP(l4)
	case unix.IPPROTO_UDP:
		var udp layers.UDP
		if err := udp.DecodeFromBytes(l4, gopacket.NilDecodeFeedback); err != nil {
			return err
		}
		p.SrcPort, p.DstPort, p.NoChecksum = uint16(udp.SrcPort), uint16(udp.DstPort), udp.Checksum == 0
		p.Payload = string(udp.Payload)
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		if len(l4) < icmpLen {
			return fmt.Errorf("%d bytes", len(l4))
		}
		p.Type, p.Code, p.Rest = l4[0], l4[1], binary.BigEndian.Uint32(l4[4:])
		if p.isEcho() {
			p.ID, p.EchoSeq, p.Rest = uint16(p.Rest>>16), uint16(p.Rest), 0
		}
		p.Payload = string(l4[icmpLen:])
	default:
		p.Payload = string(l4)
	}
	return nil
}

func (p *Packet) decodeTCP(l4 []byte) error {
	const header = 20
	if len(l4) < 8 {
		return fmt.Errorf("%d bytes", len(l4))
	}
	if len(l4) < header { // quoted by an ICMP error: only ports and Seq are guaranteed
		p.SrcPort, p.DstPort = binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
		p.Seq = binary.BigEndian.Uint32(l4[4:])
		return nil
	}
	var tcp layers.TCP
	if err := tcp.DecodeFromBytes(l4, gopacket.NilDecodeFeedback); err != nil {
		return err
	}
	p.SrcPort, p.DstPort = uint16(tcp.SrcPort), uint16(tcp.DstPort)
	p.Seq, p.Ack, p.Window = tcp.Seq, tcp.Ack, tcp.Window
	p.TCPFlags = l4[13] & (FIN | SYN | RST | PSH | ACK | URG)
	p.Payload = string(tcp.Payload)
	return nil
}

func address(ip net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(ip)
	return addr
}
