package testenv

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Fragment cuts the IP packet in a frame into fragments with size bytes of payload, a multiple
// of 8, as a router (IPv4) or the sender (IPv6) does. It returns their frames in order, with the
// identification id.
func Fragment(frame []byte, size int, id uint32) ([][]byte, error) {
	return FragmentFrom(frame, size, size, id)
}

// FragmentFrom does the same, but the first fragment has another size.
func FragmentFrom(frame []byte, first, size int, id uint32) ([][]byte, error) {
	p, err := Decode(frame)
	if err != nil {
		return nil, fmt.Errorf("packet to fragment: %w", err)
	}
	if p.Fragmented || min(first, size) <= 0 || (first|size)%8 != 0 {
		return nil, fmt.Errorf("fragment packet into %d and %d bytes: expected multiples of 8, and a packet that is no fragment", first, size)
	}
	headerLen := etherLen + ipv6Len
	if p.Src.Is4() {
		headerLen = etherLen + ipv4Len + len(p.Options)
	}
	header, payload := frame[:headerLen], frame[headerLen:]

	var frames [][]byte
	for offset, end := 0, 0; offset < len(payload); offset = end {
		end = min(offset+size, len(payload))
		if offset == 0 {
			end = min(first, len(payload))
		}
		fragment := append([]byte(nil), header...)
		if p.Src.Is4() {
			fragmentIPv4(fragment[etherLen:], offset, end-offset, end < len(payload), uint16(id))
		} else {
			fragment = fragmentIPv6(fragment, p.Proto, offset, end-offset, end < len(payload), id)
		}
		frames = append(frames, append(fragment, payload[offset:end]...))
	}
	return frames, nil
}

func fragmentIPv4(header []byte, offset, length int, more bool, id uint16) {
	const moreFragments = 0x2000
	field := uint16(offset / 8)
	if more {
		field |= moreFragments
	}
	binary.BigEndian.PutUint16(header[2:], uint16(len(header)+length))
	binary.BigEndian.PutUint16(header[4:], id)
	binary.BigEndian.PutUint16(header[6:], field)
	setIPv4Checksum(header)
}

func fragmentIPv6(header []byte, proto uint8, offset, length int, more bool, id uint32) []byte {
	ip := header[etherLen:]
	binary.BigEndian.PutUint16(ip[4:], uint16(fragmentLen+length))
	ip[6] = unix.IPPROTO_FRAGMENT
	field := uint16(offset)
	if more {
		field |= 1
	}
	header = append(header, proto, 0)
	header = binary.BigEndian.AppendUint16(header, field)
	return binary.BigEndian.AppendUint32(header, id)
}
