package testenv

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	etherLen    = 14
	ipv4Len     = 20
	ipv6Len     = 40
	udpLen      = 8
	icmpLen     = 8
	fragmentLen = 8
)

// VerifyChecksums verifies every checksum of a frame: of the IPv4 header, of TCP, UDP, ICMP or
// ICMPv6, and of the packet that an ICMP error quotes, if it is complete. A UDP checksum of 0 is
// valid only in IPv4. Of fragments, only the IP header can be verified.
//
// It shares no code with the datapath or gopacket.
func VerifyChecksums(frame []byte) error {
	if len(frame) < etherLen {
		return errors.New("verify checksums: no Ethernet header")
	}
	var err error
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_IP:
		err = verifyIPv4(frame[etherLen:], false)
	case unix.ETH_P_IPV6:
		err = verifyIPv6(frame[etherLen:], false)
	}
	if err != nil {
		return fmt.Errorf("verify checksums: %w", err)
	}
	return nil
}

// verifyIPv4 verifies an IPv4 packet, which may be truncated if it is quoted.
func verifyIPv4(packet []byte, quoted bool) error {
	if len(packet) < ipv4Len || packet[0]>>4 != 4 {
		return fmt.Errorf("no IPv4 header in %d bytes", len(packet))
	}
	headerLen := int(packet[0]&15) * 4
	if headerLen < ipv4Len || len(packet) < headerLen {
		return fmt.Errorf("IPv4 header of %d bytes in %d", headerLen, len(packet))
	}
	if got := sum16(packet[:headerLen], 0); got != 0xffff {
		return fmt.Errorf("IPv4 header checksum %#04x is wrong", binary.BigEndian.Uint16(packet[10:]))
	}
	total := int(binary.BigEndian.Uint16(packet[2:]))
	if total == 0 { // BIG TCP.
		total = len(packet)
	}
	if total < headerLen {
		return fmt.Errorf("IPv4 total length %d", total)
	}
	const moreOrOffset = 0x3fff
	if binary.BigEndian.Uint16(packet[6:])&moreOrOffset != 0 {
		return nil
	}
	if len(packet) < total {
		return incomplete(quoted, len(packet), total)
	}
	pseudo := sum32(packet[12:20], uint32(packet[9])+uint32(total-headerLen))
	return verifyTransport(packet[9], packet[headerLen:total], pseudo, true)
}

// verifyIPv6 verifies an IPv6 packet, which may be truncated if it is quoted.
func verifyIPv6(packet []byte, quoted bool) error {
	if len(packet) == 0 || packet[0]>>4 != 6 {
		return errors.New("no IPv6 header")
	}
	if len(packet) < ipv6Len {
		return incomplete(quoted, len(packet), ipv6Len)
	}
	total := ipv6Len + int(binary.BigEndian.Uint16(packet[4:]))
	if total == ipv6Len && packet[6] != unix.IPPROTO_NONE { // BIG TCP.
		total = len(packet)
	}
	if len(packet) < total {
		return incomplete(quoted, len(packet), total)
	}
	next, payload := packet[6], packet[ipv6Len:total]
	for {
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			if len(payload) < 8 || len(payload) < 8+int(payload[1])*8 {
				return fmt.Errorf("IPv6 extension header %d in %d bytes", next, len(payload))
			}
			next, payload = payload[0], payload[8+int(payload[1])*8:]
			continue
		case unix.IPPROTO_FRAGMENT:
			if len(payload) < fragmentLen {
				return fmt.Errorf("IPv6 fragment header in %d bytes", len(payload))
			}
			const moreOrOffset = 0xfff9
			if binary.BigEndian.Uint16(payload[2:])&moreOrOffset != 0 {
				return nil
			}
			next, payload = payload[0], payload[fragmentLen:]
			continue
		}
		pseudo := sum32(packet[8:40], uint32(next)+uint32(len(payload)))
		return verifyTransport(next, payload, pseudo, false)
	}
}

// verifyTransport verifies the segment after IP. pseudo is the sum of the pseudo header.
func verifyTransport(proto uint8, segment []byte, pseudo uint32, ipv4 bool) error {
	var (
		name   string
		header int // its length
		field  int // offset of the checksum
	)
	switch {
	case proto == unix.IPPROTO_TCP:
		name, header, field = "TCP", 20, 16
	case proto == unix.IPPROTO_UDP:
		name, header, field = "UDP", udpLen, 6
	case proto == unix.IPPROTO_ICMP && ipv4:
		name, header, field = "ICMP", icmpLen, 2
		pseudo = 0
	case proto == unix.IPPROTO_ICMPV6 && !ipv4:
		name, header, field = "ICMPv6", icmpLen, 2
	default:
		return nil
	}
	if len(segment) < header {
		return fmt.Errorf("%s header in %d bytes", name, len(segment))
	}
	checksum := binary.BigEndian.Uint16(segment[field:])
	if proto == unix.IPPROTO_UDP {
		if length := int(binary.BigEndian.Uint16(segment[4:])); length != len(segment) {
			return fmt.Errorf("UDP length %d in %d bytes", length, len(segment))
		}
		if checksum == 0 {
			if ipv4 {
				return nil
			}
			return errors.New("UDP checksum 0 in IPv6")
		}
	}
	if sum16(segment, pseudo) != 0xffff {
		return fmt.Errorf("%s checksum %#04x is wrong", name, checksum)
	}
	if isICMPError(proto, segment[0]) {
		verify := verifyIPv6
		if ipv4 {
			verify = verifyIPv4
		}
		if err := verify(segment[icmpLen:], true); err != nil {
			return fmt.Errorf("packet quoted by %s type %d: %w", name, segment[0], err)
		}
	}
	return nil
}

// isICMPError reports whether an ICMP or ICMPv6 message quotes a packet.
func isICMPError(proto, typ uint8) bool {
	switch proto {
	case unix.IPPROTO_ICMP:
		return typ == 3 || typ == 4 || typ == 5 || typ == 11 || typ == 12
	case unix.IPPROTO_ICMPV6:
		return typ < 128
	}
	return false
}

func incomplete(quoted bool, have, want int) error {
	if quoted {
		return nil
	}
	return fmt.Errorf("truncated packet: %d of %d bytes", have, want)
}

// sum32 adds data to sum as big-endian 16-bit words. It cannot overflow, because a frame
// has fewer than 65536 words.
func sum32(data []byte, sum uint32) uint32 {
	for len(data) >= 2 {
		sum += uint32(binary.BigEndian.Uint16(data))
		data = data[2:]
	}
	if len(data) == 1 {
		sum += uint32(data[0]) << 8
	}
	return sum
}

// sum16 returns the one's complement sum of data and start. It is 0xffff if data includes
// its correct checksum.
func sum16(data []byte, start uint32) uint16 {
	sum := sum32(data, start)
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

func setIPv4Checksum(header []byte) {
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], ^sum16(header, 0))
}
