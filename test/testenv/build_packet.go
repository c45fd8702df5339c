package testenv

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"
)

// Build returns the packet's frame with correct lengths and checksums. The checksum of a
// fragment covers only that fragment, which is correct for no datagram: use [Fragment] to
// cut a whole packet.
func (p Packet) Build() ([]byte, error) {
	ip, err := p.BuildIP()
	if err != nil {
		return nil, err
	}
	frame := make([]byte, 0, etherLen+len(ip))
	frame = append(frame, p.DstMAC[:]...)
	frame = append(frame, p.SrcMAC[:]...)
	etherType := uint16(unix.ETH_P_IP)
	if p.Src.Is6() {
		etherType = unix.ETH_P_IPV6
	}
	frame = binary.BigEndian.AppendUint16(frame, etherType)
	return append(frame, ip...), nil
}

// MustBuild is Build for packets that are known to be valid. It panics otherwise.
func (p Packet) MustBuild() []byte {
	frame, err := p.Build()
	if err != nil {
		panic(err)
	}
	return frame
}

// BuildIP is Build without the Ethernet header.
func (p Packet) BuildIP() ([]byte, error) {
	if !p.Src.IsValid() || p.Src.Is4() != p.Dst.Is4() {
		return nil, fmt.Errorf("build packet from %s to %s: different address families", p.Src, p.Dst)
	}
	chain, network, err := p.networkLayers()
	if err != nil {
		return nil, err
	}
	if p.FragOffset == 0 {
		chain = append(chain, p.transportLayers(network)...)
	}
	chain = append(chain, gopacket.Payload(p.Payload))

	buf := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, options, chain...); err != nil {
		return nil, fmt.Errorf("build packet: %w", err)
	}
	ip := buf.Bytes()
	if p.Proto == unix.IPPROTO_UDP && p.NoChecksum && p.FragOffset == 0 {
		checksum := ip[len(ip)-len(p.Payload)-2:]
		checksum[0], checksum[1] = 0, 0
	}
	if p.Src.Is4() && p.Options != "" {
		return insertOptions(ip, p.Options), nil
	}
	return ip, nil
}

// networkLayers returns the IP header and, for IPv6 fragments, the fragment header.
func (p Packet) networkLayers() ([]gopacket.SerializableLayer, gopacket.NetworkLayer, error) {
	if p.FragOffset%8 != 0 {
		return nil, nil, errors.New("build packet: fragment offset is not a multiple of 8")
	}
	if p.Src.Is4() {
		ip := &layers.IPv4{
			Version: 4, TOS: p.TOS, Id: uint16(p.IPID), FragOffset: p.FragOffset / 8,
			TTL: p.TTL, Protocol: layers.IPProtocol(p.Proto), SrcIP: p.Src.AsSlice(), DstIP: p.Dst.AsSlice(),
		}
		if p.DontFragment {
			ip.Flags |= layers.IPv4DontFragment
		}
		if p.MoreFragments {
			ip.Flags |= layers.IPv4MoreFragments
		}
		if len(p.Options)%4 != 0 || len(p.Options) > 40 {
			return nil, nil, fmt.Errorf("build packet: %d bytes of IPv4 options", len(p.Options))
		}
		return []gopacket.SerializableLayer{ip}, ip, nil
	}
	ip := &layers.IPv6{
		Version: 6, TrafficClass: p.TOS, FlowLabel: p.FlowLabel, HopLimit: p.TTL,
		NextHeader: layers.IPProtocol(p.Proto), SrcIP: p.Src.AsSlice(), DstIP: p.Dst.AsSlice(),
	}
	if !p.Fragmented {
		return []gopacket.SerializableLayer{ip}, ip, nil
	}
	ip.NextHeader = layers.IPProtocolIPv6Fragment
	fragment := &layers.IPv6Fragment{
		NextHeader: layers.IPProtocol(p.Proto), FragmentOffset: p.FragOffset / 8,
		MoreFragments: p.MoreFragments, Identification: p.IPID,
	}
	return []gopacket.SerializableLayer{ip, fragment}, ip, nil
}

// insertOptions inserts options, which may be malformed, into an IPv4 packet without
// options. gopacket would write only well-formed ones.
func insertOptions(packet []byte, options string) []byte {
	header := append(append([]byte(nil), packet[:ipv4Len]...), options...)
	header[0] = 4<<4 | byte(len(header)/4)
	binary.BigEndian.PutUint16(header[2:], uint16(len(packet)+len(options)))
	setIPv4Checksum(header)
	return append(header, packet[ipv4Len:]...)
}

// transportLayers returns the header after IP, or nil for a protocol that Packet does not
// describe. network provides the addresses for checksums.
func (p Packet) transportLayers(network gopacket.NetworkLayer) []gopacket.SerializableLayer {
	rest := p.Rest
	if p.isEcho() {
		rest = uint32(p.ID)<<16 | uint32(p.EchoSeq)
	}
	switch p.Proto {
	case unix.IPPROTO_TCP:
		tcp := &layers.TCP{
			SrcPort: layers.TCPPort(p.SrcPort), DstPort: layers.TCPPort(p.DstPort),
			Seq: p.Seq, Ack: p.Ack, Window: p.Window,
			FIN: p.TCPFlags&FIN != 0, SYN: p.TCPFlags&SYN != 0, RST: p.TCPFlags&RST != 0,
			PSH: p.TCPFlags&PSH != 0, ACK: p.TCPFlags&ACK != 0, URG: p.TCPFlags&URG != 0,
		}
		tcp.SetNetworkLayerForChecksum(network)
		return []gopacket.SerializableLayer{tcp}
	case unix.IPPROTO_UDP:
		udp := &layers.UDP{SrcPort: layers.UDPPort(p.SrcPort), DstPort: layers.UDPPort(p.DstPort)}
		udp.SetNetworkLayerForChecksum(network)
		return []gopacket.SerializableLayer{udp}
	case unix.IPPROTO_ICMP:
		return []gopacket.SerializableLayer{&layers.ICMPv4{
			TypeCode: layers.CreateICMPv4TypeCode(p.Type, p.Code), Id: uint16(rest >> 16), Seq: uint16(rest),
		}}
	case unix.IPPROTO_ICMPV6:
		icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(p.Type, p.Code)}
		icmp.SetNetworkLayerForChecksum(network)
		// gopacket's layer ends before the second word.
		return []gopacket.SerializableLayer{icmp, gopacket.Payload(binary.BigEndian.AppendUint32(nil, rest))}
	}
	return nil
}
