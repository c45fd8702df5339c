package prog

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// How rows edit frames and packets.

const etherLen = 14

// protocol changes the packet's protocol; the payload stands for its header.
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

// fragment returns the first or, for 1, the last fragment of the packet.
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

// headerLen returns the length of the Ethernet and IP headers without options.
func (s scene) headerLen() int {
	if s.name == "v4" {
		return etherLen + 20
	}
	return etherLen + 40
}

// headerLenOf is headerLen for a frame whose IP header may have options.
func headerLenOf(frame []byte) int {
	if frame[etherLen]>>4 == 4 {
		return etherLen + int(frame[etherLen]&15)*4
	}
	return etherLen + 40
}

// untestable reports whether some kernels refuse a frame in a test run: they require an
// IP header behind the Ethernet header of every device.
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

// cut truncates the frame after the given number of bytes behind the IP header.
func cut(keep int) func(scene, []byte) []byte {
	return func(_ scene, frame []byte) []byte { return frame[:headerLenOf(frame)+keep] }
}

// extended inserts an empty hop-by-hop header behind the IPv6 header, routed a routing header.
func extended(s scene, frame []byte) []byte { return extend(s, frame, unix.IPPROTO_HOPOPTS, 1) }
func routed(s scene, frame []byte) []byte   { return extend(s, frame, unix.IPPROTO_ROUTING, 1) }

// withHeaders inserts count headers of a kind behind the IPv6 header.
func withHeaders(count int, kind byte) func(scene, []byte) []byte {
	return func(s scene, frame []byte) []byte {
		for range count {
			frame = extend(s, frame, kind, 1)
			if kind == unix.IPPROTO_FRAGMENT { // of a packet in one piece
				clear(frame[s.headerLen()+1:][:7])
			}
		}
		return frame
	}
}

// timestamp makes an echo request a message that is neither an echo nor an error.
func timestamp(s scene, frame []byte) []byte {
	frame[headerLenOf(frame)] = map[string]byte{"v4": 13, "v6": 139}[s.name] // of ICMPv6: a node information query
	return frame
}

// priority puts the frame behind a tag of VLAN 0, as it is when the kernel has removed another one.
func priority(etherType uint16) func(scene, []byte) []byte {
	return func(_ scene, frame []byte) []byte {
		return slices.Insert(frame, 12, byte(etherType>>8), byte(etherType), 0xe0, 0)
	}
}

// extend inserts a header of the given number of 8-byte units behind the IPv6 header, padded by PadN options.
func extend(s scene, frame []byte, kind byte, units int) []byte {
	header := make([]byte, 8*units)
	header[0], header[1], header[2], header[3] = frame[20], byte(units-1), 1, byte(8*units-4)
	frame = slices.Insert(frame, s.headerLen(), header...)
	frame[20] = kind
	binary.BigEndian.PutUint16(frame[18:], uint16(len(frame)-s.headerLen()))
	return frame
}
