package testenv

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Sender is a container that bypasses its own stack to send frames, with the addresses around it.
type Sender struct {
	MAC, HostMAC       MAC
	Addr4, Addr6       netip.Addr // its own
	Other4, Other6     netip.Addr // another container's
	Gateway4, Gateway6 netip.Addr
	Remote4, Remote6   netip.Addr // a destination
}

// Frame is a named frame.
type Frame struct {
	Name  string
	Bytes []byte
	// Reason is the expected drop reason of an illegal frame.
	Reason bpf.Reason
}

// Addresses that do not depend on the sender.
var (
	hostLinkLocal = netip.MustParseAddr("fe80::1")
	unspecified4  = netip.IPv4Unspecified()
	unspecified6  = netip.IPv6Unspecified()
	allNodes      = netip.MustParseAddr("ff02::1")
	allRouters    = netip.MustParseAddr("ff02::2")
	broadcast     = netip.MustParseAddr("255.255.255.255")
)

const (
	icmpRedirect      = 5
	icmpRouterAdvert  = 9
	icmp6Report       = 143
	icmp6RouterAsk    = 133
	icmp6RouterAdvert = 134
	icmp6NeighborAsk  = 135
	icmp6Neighbor     = 136
	icmp6Redirect     = 137
)

// LinkLocalOf returns the link-local address that the kernel derives from a MAC address.
func LinkLocalOf(m MAC) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]})
}

// Hostile returns frames that a container must not send.
func (s Sender) Hostile() []Frame {
	return slices.Concat(s.spoofed(), s.forgedControl(), s.tunneled())
}

// foreignMAC belongs to nobody.
var foreignMAC = MAC{2, 0, 0, 0, 0, 0x66}

// spoofed returns frames with a source that is not the container's.
func (s Sender) spoofed() []Frame {
	const mac, address, gateway, headers = bpf.ReasonMAC, bpf.ReasonAddress, bpf.ReasonGateway, bpf.ReasonHeaders
	mapped := netip.AddrFrom16(s.Addr4.As16())
	return []Frame{
		{"another MAC, IPv4", from(foreignMAC, s.udp(s.Addr4, s.Remote4)), mac},
		{"another MAC, IPv6", from(foreignMAC, s.udp(s.Addr6, s.Remote6)), mac},
		{"the host's MAC", from(s.HostMAC, s.udp(s.Addr4, s.Remote4)), mac},
		{"a group's MAC", from(MAC{1, 0, 0x5e, 0, 0, 1}, s.udp(s.Addr4, s.Remote4)), mac},
		{"another MAC, ARP", from(foreignMAC, s.arp(1, s.MAC, s.Addr4, s.Gateway4)), mac},
		{"another MAC, neither IP nor ARP", from(foreignMAC, s.frame(0x88cc, make([]byte, 60))), mac},
		{"another container's IPv4 address", s.udp(s.Other4, s.Remote4), address},
		{"another container's IPv6 address", s.udp(s.Other6, s.Remote6), address},
		{"a remote's IPv4 address", s.udp(s.Remote4, s.Addr4), address},
		{"a remote's IPv6 address", s.udp(s.Remote6, s.Addr6), address},
		{"loopback, IPv4", s.udp(netip.MustParseAddr("127.0.0.1"), s.Remote4), address},
		{"loopback, IPv6", s.udp(netip.IPv6Loopback(), s.Remote6), address},
		{"a group's IPv4 address", s.udp(netip.MustParseAddr("224.0.0.1"), s.Remote4), address},
		{"a group's IPv6 address", s.udp(allNodes, s.Remote6), address},
		{"the broadcast address", s.udp(broadcast, s.Remote4), address},
		{"a link-local IPv4 address", s.udp(netip.MustParseAddr("169.254.9.9"), s.Remote4), address},
		{"its own IPv4 address in IPv6", s.udp6(mapped, s.Remote6), address},
		{"no IPv4 address", s.udp(unspecified4, s.Remote4), address},
		{"no IPv6 address", s.udp(unspecified6, s.Remote6), address},
		{"another's TCP, IPv4", s.tcp(s.Other4, s.Remote4), address},
		{"another's TCP, IPv6", s.tcp(s.Other6, s.Remote6), address},
		{"another's ping, IPv4", s.ping(s.Other4, s.Remote4), address},
		{"another's ping, IPv6", s.ping(s.Other6, s.Remote6), address},
		{"another's ESP", s.packet(Packet{Src: s.Other4, Dst: s.Remote4, Proto: unix.IPPROTO_ESP, Payload: "a header and more"}), address},
		{"another's ICMP error", s.icmpError(s.Other4, s.Addr4, s.Remote4), address},
		{"another's ICMPv6 error", s.icmpError(s.Other6, s.Addr6, s.Remote6), address},
		{"an ICMP error about a packet to another", s.icmpError(s.Addr4, s.Remote4, s.Other4), bpf.ReasonICMPError},
		{"an ICMPv6 error about a packet to another", s.icmpError(s.Addr6, s.Remote6, s.Other6), bpf.ReasonICMPError},
		{"another's first fragment, IPv4", s.fragment(0, s.Other4, s.Remote4), address},
		{"another's later fragment, IPv4", s.fragment(1, s.Other4, s.Remote4), address},
		{"another's first fragment, IPv6", s.fragment(0, s.Other6, s.Remote6), address},
		{"another's later fragment, IPv6", s.fragment(1, s.Other6, s.Remote6), address},
		{"another's, with IPv4 options", s.packet(options(udpBetween(s.Other4, s.Remote4))), address},
		{"another's, with a hop-by-hop header", Extended(s.udp(s.Other6, s.Remote6), unix.IPPROTO_HOPOPTS), address},
		{"another's IPv4 address in a VLAN", Tagged(s.udp(s.Other4, s.Remote4), 5), address},
		{"another's IPv6 address in a VLAN", Tagged(s.udp(s.Other6, s.Remote6), 5), address},
		{"another's IPv4 address in VLAN 0", Tagged(s.udp(s.Other4, s.Remote4), 0), address},
		{"another's IPv6 address in VLAN 0", Tagged(s.udp(s.Other6, s.Remote6), 0), address},
		{"another's address in two VLANs", Tagged(Tagged(s.udp(s.Other4, s.Remote4), 5), 0), address},
		{"another's fragment in a VLAN", Tagged(s.fragment(1, s.Other4, s.Remote4), 5), address},
		{"four VLANs", Tagged(Tagged(Tagged(Tagged(s.udp(s.Addr4, s.Remote4), 5), 5), 5), 5), headers},
		{"the gateway's IPv4 address", s.udp(s.Gateway4, s.Remote4), gateway},
		{"the gateway's IPv6 address", s.udp(s.Gateway6, s.Remote6), gateway},
		{"the gateway's link-local address", s.udp(hostLinkLocal, s.Remote6), gateway},
		{"the gateway's address in a VLAN", Tagged(s.udp(s.Gateway4, s.Remote4), 5), gateway},
	}
}

// forgedControl returns ARP, neighbor discovery, router and DHCP messages that a container must not send.
func (s Sender) forgedControl() []Frame {
	const (
		address, gateway, headers, truncated = bpf.ReasonAddress, bpf.ReasonGateway, bpf.ReasonHeaders, bpf.ReasonTruncated
		arp, neighbor, router, dhcp          = bpf.ReasonARP, bpf.ReasonNeighbor, bpf.ReasonRouter, bpf.ReasonDHCPServer
	)
	return []Frame{
		{"ARP request as another", s.arp(1, s.MAC, s.Other4, s.Gateway4), arp},
		{"ARP reply as another", s.arp(2, s.MAC, s.Other4, s.Gateway4), arp},
		{"ARP reply as the gateway", s.arp(2, s.MAC, s.Gateway4, s.Addr4), arp},
		{"ARP announcement of another", s.arp(1, s.MAC, s.Other4, s.Other4), arp},
		{"ARP reply with another MAC inside", s.arp(2, foreignMAC, s.Addr4, s.Gateway4), arp},
		{"ARP probe for another's address", s.arp(1, s.MAC, unspecified4, s.Other4), arp},
		{"ARP reply as another in a VLAN", Tagged(s.arp(2, s.MAC, s.Other4, s.Gateway4), 5), arp},
		{"half an ARP reply", s.arp(2, s.MAC, s.Other4, s.Gateway4)[:etherLen+20], truncated},
		{"neighbor advertisement of another", s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Other6), neighbor},
		{"neighbor advertisement of the gateway", s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Gateway6), neighbor},
		{"neighbor advertisement of the gateway, link-local", s.neighbor(icmp6Neighbor, LinkLocalOf(s.MAC), allNodes, hostLinkLocal), neighbor},
		{"neighbor advertisement as another", s.neighbor(icmp6Neighbor, s.Other6, allNodes, s.Other6), address},
		{"neighbor advertisement from no address", s.neighbor(icmp6Neighbor, unspecified6, allNodes, s.Addr6), address},
		{"neighbor solicitation as another", s.neighbor(icmp6NeighborAsk, s.Other6, allNodes, s.Gateway6), address},
		{"neighbor solicitation as the gateway", s.neighbor(icmp6NeighborAsk, hostLinkLocal, allNodes, s.Other6), gateway},
		{"duplicate address detection of another's address", s.neighbor(icmp6NeighborAsk, unspecified6, allNodes, s.Other6), neighbor},
		{"neighbor advertisement of another, behind options", Extended(s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Other6), unix.IPPROTO_DSTOPTS), neighbor},
		{"neighbor advertisement of another, behind a fragment header", Extended(s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Other6), unix.IPPROTO_FRAGMENT), neighbor},
		{"neighbor advertisement of another, behind two fragment headers", Extended(s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Other6), unix.IPPROTO_FRAGMENT, unix.IPPROTO_FRAGMENT), neighbor},
		{"neighbor advertisement of another, in a VLAN", Tagged(s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Other6), 0), neighbor},
		{"neighbor advertisement of another, in fragments", Extended(s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Other6), unix.IPPROTO_FRAGMENT)[:etherLen+ipv6Len+8+8], truncated},
		{"router advertisement", s.neighbor(icmp6RouterAdvert, LinkLocalOf(s.MAC), allNodes, unspecified6), router},
		{"router advertisement as the gateway", s.neighbor(icmp6RouterAdvert, hostLinkLocal, allNodes, unspecified6), gateway},
		{"router advertisement from its own address", s.neighbor(icmp6RouterAdvert, s.Addr6, allNodes, unspecified6), router},
		{"router advertisement behind options", Extended(s.neighbor(icmp6RouterAdvert, LinkLocalOf(s.MAC), allNodes, unspecified6), unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS), router},
		{"router advertisement behind many headers", Extended(s.neighbor(icmp6RouterAdvert, LinkLocalOf(s.MAC), allNodes, unspecified6),
			unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_DSTOPTS), headers},
		{"router advertisement in a VLAN", Tagged(s.neighbor(icmp6RouterAdvert, LinkLocalOf(s.MAC), allNodes, unspecified6), 5), router},
		{"redirect, IPv6", s.neighbor(icmp6Redirect, LinkLocalOf(s.MAC), s.Other6, s.Remote6), router},
		{"redirect, IPv4", s.packet(Packet{Src: s.Addr4, Dst: s.Other4, Proto: unix.IPPROTO_ICMP, Type: icmpRedirect, Payload: "a packet's header"}), router},
		{"router advertisement, IPv4", s.packet(Packet{Src: s.Addr4, Dst: broadcast, Proto: unix.IPPROTO_ICMP, Type: icmpRouterAdvert, Payload: "routers"}), router},
		{"DHCP offer", s.dhcp(s.Addr4, broadcast, 67, 68), dhcp},
		{"DHCP offer from an odd port", s.dhcp(s.Addr4, s.Other4, 4067, 68), dhcp},
		{"DHCP offer in a VLAN", Tagged(s.dhcp(s.Addr4, broadcast, 67, 68), 5), dhcp},
		{"DHCP offer as the gateway", s.dhcp(s.Gateway4, broadcast, 67, 68), gateway},
		{"DHCP offer from no address", s.dhcp(unspecified4, broadcast, 67, 68), address},
		{"DHCPv6 advertisement", s.dhcp(LinkLocalOf(s.MAC), allNodes, 547, 546), dhcp},
		{"DHCPv6 advertisement from its own address", s.dhcp(s.Addr6, s.Other6, 547, 546), dhcp},
	}
}

// tunneled returns packets for tunnels of the host.
func (s Sender) tunneled() []Frame {
	const tunnel = bpf.ReasonTunnel
	return []Frame{
		{"IPIP to the gateway", s.tunnel(unix.IPPROTO_IPIP, s.Addr4, s.Gateway4), tunnel},
		{"6in4 to the gateway", s.tunnel(unix.IPPROTO_IPV6, s.Addr4, s.Gateway4), tunnel},
		{"GRE to the gateway", s.tunnel(unix.IPPROTO_GRE, s.Addr4, s.Gateway4), tunnel},
		{"L2TP to the gateway", s.tunnel(unix.IPPROTO_L2TP, s.Addr4, s.Gateway4), tunnel},
		{"MPLS to the gateway", s.tunnel(unix.IPPROTO_MPLS, s.Addr4, s.Gateway4), tunnel},
		{"GRE to all", s.tunnel(unix.IPPROTO_GRE, s.Addr4, broadcast), tunnel},
		{"GRE in a VLAN", Tagged(s.tunnel(unix.IPPROTO_GRE, s.Addr4, s.Gateway4), 0), tunnel},
		{"IPv4 in IPv6 to the gateway", s.tunnel(unix.IPPROTO_IPIP, s.Addr6, s.Gateway6), tunnel},
		{"IPv6 in IPv6 to the gateway", s.tunnel(unix.IPPROTO_IPV6, s.Addr6, s.Gateway6), tunnel},
		{"GRE to the gateway, IPv6", s.tunnel(unix.IPPROTO_GRE, s.Addr6, s.Gateway6), tunnel},
		{"GRE to the gateway, link-local", s.tunnel(unix.IPPROTO_GRE, LinkLocalOf(s.MAC), hostLinkLocal), tunnel},
		{"GRE to all, IPv6", s.tunnel(unix.IPPROTO_GRE, s.Addr6, allNodes), tunnel},
		{"GRE behind options", Extended(s.tunnel(unix.IPPROTO_GRE, s.Addr6, s.Gateway6), unix.IPPROTO_DSTOPTS), tunnel},
		{"GRE behind a fragment header", Extended(s.tunnel(unix.IPPROTO_GRE, s.Addr6, s.Gateway6), unix.IPPROTO_FRAGMENT), tunnel},
	}
}

// ToBridges returns frames that a container must not send behind a bridge.
func (s Sender) ToBridges() []Frame {
	var (
		bridges = MAC{1, 0x80, 0xc2, 0, 0, 0}
		cisco   = MAC{1, 0, 0xc, 0xcc, 0xcc, 0xcd}
		lldp    = MAC{1, 0x80, 0xc2, 0, 0, 0xe}
		bpdu    = "\x42\x42\x03\x00\x00\x02\x02" // spanning tree
		snap    = "\xaa\xaa\x03\x00\x00\x0c\x01\x0b"
		raw     = "\xff\xff\x00\x28"
	)
	llc := func(dst MAC, payload string) []byte {
		frame := s.frame(38, append([]byte(payload), make([]byte, 46-len(payload))...))
		copy(frame, dst[:])
		return frame
	}
	neighbor := s.frame(0x88cc, make([]byte, 46))
	copy(neighbor, lldp[:])
	const reason = bpf.ReasonBridge
	return []Frame{
		{"spanning tree", llc(bridges, bpdu), reason},
		{"spanning tree in a VLAN", Tagged(llc(bridges, bpdu), 5), reason},
		{"spanning tree in VLAN 0", Tagged(llc(bridges, bpdu), 0), reason},
		{"spanning tree of a VLAN", llc(cisco, snap), reason},
		{"802.3", llc(s.HostMAC, raw), reason},
		{"LLDP", neighbor, reason},
	}
}

// Legal returns frames that every container may send.
func (s Sender) Legal() []Frame {
	own := LinkLocalOf(s.MAC)
	frames := map[string][]byte{
		"UDP, IPv4":                    s.udp(s.Addr4, s.Remote4),
		"UDP, IPv6":                    s.udp(s.Addr6, s.Remote6),
		"TCP, IPv4":                    s.tcp(s.Addr4, s.Remote4),
		"TCP, IPv6":                    s.tcp(s.Addr6, s.Remote6),
		"ping, IPv4":                   s.ping(s.Addr4, s.Gateway4),
		"ping, IPv6":                   s.ping(s.Addr6, s.Gateway6),
		"ping of the link":             s.ping(own, hostLinkLocal),
		"to all":                       s.udp(s.Addr4, broadcast),
		"IPv4 options":                 s.packet(options(udpBetween(s.Addr4, s.Remote4))),
		"GRE":                          s.tunnel(unix.IPPROTO_GRE, s.Addr4, s.Remote4),
		"6in4 to a container":          s.tunnel(unix.IPPROTO_IPV6, s.Addr4, s.Other4),
		"IPv4 in IPv6":                 s.tunnel(unix.IPPROTO_IPIP, s.Addr6, s.Remote6),
		"ESP to the gateway":           s.tunnel(unix.IPPROTO_ESP, s.Addr4, s.Gateway4),
		"a hop-by-hop header":          Extended(s.udp(s.Addr6, s.Remote6), unix.IPPROTO_HOPOPTS),
		"first fragment, IPv4":         s.fragment(0, s.Addr4, s.Remote4),
		"later fragment, IPv4":         s.fragment(1, s.Addr4, s.Remote4),
		"first fragment, IPv6":         s.fragment(0, s.Addr6, s.Remote6),
		"later fragment, IPv6":         s.fragment(1, s.Addr6, s.Remote6),
		"ESP":                          s.packet(Packet{Src: s.Addr6, Dst: s.Remote6, Proto: unix.IPPROTO_ESP, Payload: "a header and more"}),
		"an ICMP error":                s.icmpError(s.Addr4, s.Remote4, s.Addr4),
		"in a VLAN, IPv4":              Tagged(s.udp(s.Addr4, s.Remote4), 5),
		"in a VLAN, IPv6":              Tagged(s.udp(s.Addr6, s.Remote6), 5),
		"ARP request":                  s.arp(1, s.MAC, s.Addr4, s.Gateway4),
		"ARP reply":                    s.arp(2, s.MAC, s.Addr4, s.Gateway4),
		"ARP announcement":             s.arp(1, s.MAC, s.Addr4, s.Addr4),
		"ARP probe":                    s.arp(1, s.MAC, unspecified4, s.Addr4),
		"neighbor solicitation":        s.neighbor(icmp6NeighborAsk, s.Addr6, allNodes, s.Gateway6),
		"neighbor solicitation, link":  s.neighbor(icmp6NeighborAsk, own, allNodes, hostLinkLocal),
		"neighbor advertisement":       s.neighbor(icmp6Neighbor, s.Addr6, allNodes, s.Addr6),
		"neighbor advertisement, link": s.neighbor(icmp6Neighbor, own, allNodes, own),
		"address detection":            s.neighbor(icmp6NeighborAsk, unspecified6, allNodes, s.Addr6),
		"address detection, link":      s.neighbor(icmp6NeighborAsk, unspecified6, allNodes, own),
		"router solicitation":          s.packet(Packet{Src: unspecified6, Dst: allRouters, Proto: unix.IPPROTO_ICMPV6, Type: icmp6RouterAsk}),
		"listener report":              Extended(s.packet(Packet{Src: unspecified6, Dst: allRouters, Proto: unix.IPPROTO_ICMPV6, Type: icmp6Report, Payload: "groups"}), unix.IPPROTO_HOPOPTS),
		"DHCP request":                 s.dhcp(unspecified4, broadcast, 68, 67),
		"DHCPv6 request":               s.dhcp(own, allRouters, 546, 547),
		"neither IP nor ARP":           s.frame(0x88cc, make([]byte, 60)),
	}
	var list []Frame
	for name, bytes := range frames {
		list = append(list, Frame{Name: name, Bytes: bytes})
	}
	return list
}

// LinkLocal returns frames that use a link-local address: they send from it, ask, and probe for it.
func (s Sender) LinkLocal(addr netip.Addr) []Frame {
	const address, neighbor = bpf.ReasonAddress, bpf.ReasonNeighbor
	return []Frame{
		{addr.String() + " pings", s.ping(addr, hostLinkLocal), address},
		{addr.String() + " solicits", s.neighbor(icmp6NeighborAsk, addr, allNodes, hostLinkLocal), address},
		{addr.String() + " is probed for", s.neighbor(icmp6NeighborAsk, unspecified6, allNodes, addr), neighbor},
	}
}

func (s Sender) packet(p Packet) []byte {
	p.SrcMAC, p.DstMAC, p.TTL = s.MAC, s.HostMAC, 255
	return p.MustBuild()
}

func (s Sender) frame(etherType uint16, payload []byte) []byte {
	frame := append(s.HostMAC[:], s.MAC[:]...)
	return append(binary.BigEndian.AppendUint16(frame, etherType), payload...)
}

func udpBetween(src, dst netip.Addr) Packet {
	return UDPPacket(netip.AddrPortFrom(src, 4000), netip.AddrPortFrom(dst, 4001), "a payload of more than one fragment")
}

func options(p Packet) Packet {
	p.Options = "\x01\x01\x01\x01"
	return p
}

func (s Sender) udp(src, dst netip.Addr) []byte { return s.packet(udpBetween(src, dst)) }

// udp6 writes an IPv4-mapped source into the IPv6 header, which Build refuses.
func (s Sender) udp6(src, dst netip.Addr) []byte {
	frame := s.udp(s.Addr6, dst)
	addr := src.As16()
	copy(frame[etherLen+8:], addr[:])
	return frame
}

func (s Sender) tcp(src, dst netip.Addr) []byte {
	return s.packet(TCPPacket(netip.AddrPortFrom(src, 4000), netip.AddrPortFrom(dst, 4001), SYN, ""))
}

func (s Sender) dhcp(src, dst netip.Addr, sport, dport uint16) []byte {
	return s.packet(UDPPacket(netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport), "DHCP"))
}

func (s Sender) tunnel(proto uint8, src, dst netip.Addr) []byte {
	return s.packet(Packet{Src: src, Dst: dst, Proto: proto, Payload: "\x00\x00\x08\x00 and another packet"})
}

func (s Sender) ping(src, dst netip.Addr) []byte {
	return s.packet(EchoPacket(src, dst, false, 7, 7, "payload"))
}

// icmpError quotes a packet from dst to peer.
func (s Sender) icmpError(src, dst, peer netip.Addr) []byte {
	const unreachable4, unreachable6 = 3, 1
	typ := uint8(unreachable4)
	if src.Is6() {
		typ = unreachable6
	}
	p, err := ICMPErrorPacket(src, udpBetween(dst, peer).MustBuild(), typ, 0, 0, 0)
	if err != nil {
		panic(err)
	}
	return s.packet(p)
}

func (s Sender) fragment(index int, src, dst netip.Addr) []byte {
	fragments, err := Fragment(s.udp(src, dst), 16, 77)
	if err != nil {
		panic(err)
	}
	return fragments[index]
}

func (s Sender) arp(operation byte, mac MAC, sender, target netip.Addr) []byte {
	from, to := sender.As4(), target.As4()
	arp := []byte{0, 1, 8, 0, 6, 4, 0, operation}
	arp = append(append(arp, mac[:]...), from[:]...)
	arp = append(append(arp, make([]byte, 6)...), to[:]...)
	return s.frame(unix.ETH_P_ARP, arp)
}

// neighbor returns a neighbor discovery message with the sender's MAC address as option.
func (s Sender) neighbor(typ uint8, src, dst, target netip.Addr) []byte {
	const sourceMAC, targetMAC = 1, 2
	addr, option := target.As16(), byte(targetMAC)
	if typ == icmp6NeighborAsk && !src.IsUnspecified() {
		option = sourceMAC
	}
	payload := append(addr[:], option, 1)
	payload = append(payload, s.MAC[:]...)
	return s.packet(Packet{Src: src, Dst: dst, Proto: unix.IPPROTO_ICMPV6, Type: typ, Rest: 1 << 29, Payload: string(payload)})
}

// from replaces the source MAC address of a frame.
func from(mac MAC, frame []byte) []byte {
	copy(frame[6:], mac[:])
	return frame
}

// Tagged adds a VLAN tag to a frame.
func Tagged(frame []byte, vlan uint16) []byte {
	tag := binary.BigEndian.AppendUint16([]byte{0x81, 0}, vlan)
	return slices.Insert(slices.Clone(frame), 12, tag...)
}

// Untagged removes all VLAN tags from a frame.
func Untagged(frame []byte) []byte {
	frame = slices.Clone(frame)
	for len(frame) > 18 && frame[12] == 0x81 && frame[13] == 0 {
		frame = slices.Delete(frame, 12, 16)
	}
	return frame
}

// Extended inserts extension headers of 8 bytes after the IPv6 header of a frame: options with padding, or fragment headers
// of whole packets.
func Extended(frame []byte, kinds ...byte) []byte {
	var headers []byte
	next := frame[etherLen+6]
	for _, kind := range slices.Backward(kinds) {
		header := []byte{next, 0, 1, 4, 0, 0, 0, 0}
		if kind == unix.IPPROTO_FRAGMENT {
			header = []byte{next, 0, 0, 0, 0, 0, 0, 9}
		}
		headers, next = append(header, headers...), kind
	}
	frame = slices.Insert(slices.Clone(frame), etherLen+ipv6Len, headers...)
	frame[etherLen+6] = next
	binary.BigEndian.PutUint16(frame[etherLen+4:], uint16(len(frame)-etherLen-ipv6Len))
	return frame
}
