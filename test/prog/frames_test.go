package prog

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// What rows do to frames, and to packets, that is out of the ordinary.

const etherLen = 14

// protocol makes the packet one of a protocol whose header is just payload.
func protocol(number uint8) func(*testenv.Packet) {
	return func(p *testenv.Packet) {
		*p = testenv.Packet{SrcMAC: p.SrcMAC, DstMAC: p.DstMAC, Src: p.Src, Dst: p.Dst, TTL: p.TTL, Proto: number}
		p.Payload = "a header and more of it"
	}
}

func to(mac testenv.MAC) func(*testenv.Packet) {
	return func(p *testenv.Packet) { p.DstMAC = mac }
}

// tagged puts the frame into VLAN 5.
func tagged(_ scene, frame []byte) []byte {
	return slices.Insert(frame, 12, 0x81, 0x00, 0, 5)
}

// typed changes the EtherType.
func typed(etherType uint16) func(scene, []byte) []byte {
	return func(_ scene, frame []byte) []byte {
		binary.BigEndian.PutUint16(frame[12:], etherType)
		return frame
	}
}

// fragment is one of the two, or three, fragments of the packet.
func fragment(index int) func(scene, []byte) []byte {
	return func(_ scene, frame []byte) []byte {
		fragments, err := testenv.Fragment(frame, 8, 99)
		if err != nil {
			panic(err)
		}
		if index > 0 {
			index = len(fragments) - 1
		}
		return fragments[index]
	}
}

// headerLen is the length of the Ethernet and IP headers.
func (s scene) headerLen() int {
	if s.name == "v4" {
		return etherLen + 20
	}
	return etherLen + 40
}

// headerLenOf is that of a frame whose IP header may have options.
func headerLenOf(frame []byte) int {
	if frame[etherLen]>>4 == 4 {
		return etherLen + int(frame[etherLen]&15)*4
	}
	return etherLen + 40
}

// untestable tells of packets that a test run does not take on some kernels, which
// look for an IP header behind an Ethernet header even where there is none.
func untestable(program string, frame []byte) bool {
	if isL3(program) {
		frame = frame[etherLen:]
	}
	if len(frame) < etherLen {
		return true
	}
	switch binary.BigEndian.Uint16(frame[12:]) {
	case unix.ETH_P_IP:
		return len(frame) < etherLen+20
	case unix.ETH_P_IPV6:
		return len(frame) < etherLen+40
	}
	return len(frame) == etherLen
}

// cut leaves so many bytes behind the IP header.
func cut(keep int) func(scene, []byte) []byte {
	return func(_ scene, frame []byte) []byte { return frame[:headerLenOf(frame)+keep] }
}

// extended puts an empty hop-by-hop header behind the IPv6 header, routed a routing header.
func extended(s scene, frame []byte) []byte { return extend(s, frame, unix.IPPROTO_HOPOPTS, 1) }
func routed(s scene, frame []byte) []byte   { return extend(s, frame, unix.IPPROTO_ROUTING, 1) }

// extend puts a header of so many units of 8 bytes behind the IPv6 header, padded by PadN options.
func extend(s scene, frame []byte, kind byte, units int) []byte {
	header := make([]byte, 8*units)
	header[0], header[1], header[2], header[3] = frame[20], byte(units-1), 1, byte(8*units-4)
	frame = slices.Insert(frame, s.headerLen(), header...)
	frame[20] = kind
	binary.BigEndian.PutUint16(frame[18:], uint16(len(frame)-s.headerLen()))
	return frame
}
