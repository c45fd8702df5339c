package prog

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Random packets of a small world: few addresses and ports, so that they collide. They are built, run and read by
// hand, since there are millions of them.

// place is an address of the world.
type place uint8

const (
	placePod place = iota
	placePod2
	placePlain
	placePodGW
	placeNode
	placeNode2
	placeRemote
	placeRemote2
	placeOnlink
	placeLoopback
	places
)

var placeNames = [places]string{"pod", "pod2", "plain", "podgw", "node", "node2", "remote", "remote2", "onlink", "loopback"}

func (p place) isPod() bool  { return p <= placePlain }
func (p place) isNode() bool { return p >= placePodGW && p <= placeNode2 }

// placeBytes has the addresses by family, IPv4 first.
var placeBytes = func() (all [2][places][]byte) {
	for family, f := range addressings {
		for p, name := range placeNames {
			all[family][p] = f.addr(name).AsSlice()
		}
	}
	return all
}()

// placeOf is the inverse of placeBytes.
func placeOf(v6 bool, addr []byte) place {
	for p, known := range placeBytes[family(v6)] {
		if string(addr) == string(known) {
			return place(p)
		}
	}
	return places
}

func placeOfWire(v6 bool, addr bpf.Addr) place {
	plain := netip.AddrFrom16(addr.Bytes).Unmap()
	return placeOf(v6, plain.AsSlice())
}

func family(v6 bool) int {
	if v6 {
		return 1
	}
	return 0
}

// tuple is what identifies a connection, as seen from one side. In echo only the side that asks has a port.
type tuple struct {
	v6           bool
	proto        uint8 // ICMP for both families
	src, dst     place
	sport, dport uint16
}

func (t tuple) reverse() tuple {
	t.src, t.dst, t.sport, t.dport = t.dst, t.src, t.dport, t.sport
	return t
}

func (t tuple) String() string {
	name := func(p place) string {
		if p >= places {
			return "?"
		}
		return placeNames[p]
	}
	return fmt.Sprintf("%s %d %s:%d > %s:%d", addressings[family(t.v6)].name, t.proto, name(t.src), t.sport, name(t.dst), t.dport)
}

// randomPacket is a packet, or an ICMP error that sender sends about a packet with the tuple.
type randomPacket struct {
	tuple
	flags    uint8 // TCP
	reply    bool  // echo
	chunk    uint8 // SCTP
	seq, ack uint32
	isError  bool
	sender   place
}

const (
	flagFIN, flagSYN, flagRST, flagACK = 1, 2, 4, 16
	chunkINIT, chunkABORT              = 1, 6
)

func (p *randomPacket) String() string {
	if p.isError {
		return fmt.Sprintf("ICMP error of %s about %s", placeNames[p.sender], p.tuple)
	}
	return fmt.Sprintf("%s, flags %#x, chunk %d", p.tuple, p.flags, p.chunk)
}

func (p *randomPacket) isSYN() bool {
	return p.proto == unix.IPPROTO_TCP && p.flags&(flagSYN|flagACK) == flagSYN
}

// refuses reports whether the packet ends a connection without being part of one.
func (p *randomPacket) refuses() bool {
	return p.proto == unix.IPPROTO_TCP && p.flags&flagRST != 0 || p.proto == unix.IPPROTO_SCTP && p.chunk == chunkABORT
}

func ipHeaderLen(v6 bool) int {
	if v6 {
		return 40
	}
	return 20
}

// l4Len is the length of what follows the IP header.
func (p *randomPacket) l4Len() int {
	if p.proto == unix.IPPROTO_TCP {
		return 20
	}
	return 16
}

// build writes the frame, without checksums: programs check none.
func (p *randomPacket) build(buf []byte, mac []byte) []byte {
	clear(buf[:140])
	copy(buf, mac)
	buf[6], buf[11] = 2, 7
	header := ipHeaderLen(p.v6)
	if !p.isError {
		p.ip(buf[etherLen:], p.src, p.dst, p.proto, p.l4Len())
		p.l4(buf[etherLen+header:])
		return p.typed(buf[:etherLen+header+p.l4Len()])
	}
	inner := header + p.l4Len()
	p.ip(buf[etherLen:], p.sender, p.src, unix.IPPROTO_ICMP, 8+inner)
	if buf[etherLen+header] = 3; p.v6 {
		buf[etherLen+header] = 1
	}
	p.ip(buf[etherLen+header+8:], p.src, p.dst, p.proto, p.l4Len())
	p.l4(buf[etherLen+header+8+header:])
	return p.typed(buf[:etherLen+header+8+inner])
}

func (p *randomPacket) typed(frame []byte) []byte {
	etherType := uint16(unix.ETH_P_IP)
	if p.v6 {
		etherType = unix.ETH_P_IPV6
	}
	binary.BigEndian.PutUint16(frame[12:], etherType)
	return frame
}

func (p *randomPacket) ip(b []byte, src, dst place, proto uint8, payload int) {
	if p.v6 {
		if proto == unix.IPPROTO_ICMP {
			proto = unix.IPPROTO_ICMPV6
		}
		b[0], b[6], b[7] = 0x60, proto, 64
		binary.BigEndian.PutUint16(b[4:], uint16(payload))
		copy(b[8:], placeBytes[1][src])
		copy(b[24:], placeBytes[1][dst])
		return
	}
	b[0], b[8], b[9] = 0x45, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(20+payload))
	copy(b[12:], placeBytes[0][src])
	copy(b[16:], placeBytes[0][dst])
}

func (p *randomPacket) l4(b []byte) {
	switch p.proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		binary.BigEndian.PutUint16(b, p.sport)
		binary.BigEndian.PutUint16(b[2:], p.dport)
		if p.proto == unix.IPPROTO_UDP {
			b[5], b[6] = 16, 0xaa // length and a checksum
			return
		}
		binary.BigEndian.PutUint32(b[4:], p.seq)
		binary.BigEndian.PutUint32(b[8:], p.ack)
		b[12], b[13] = 0x50, p.flags
	case unix.IPPROTO_ICMP:
		kinds := [2][2]byte{{8, 0}, {128, 129}}[family(p.v6)] // request, reply
		if b[0] = kinds[0]; p.reply {
			b[0] = kinds[1]
		}
		binary.BigEndian.PutUint16(b[4:], p.sport|p.dport)
	case unix.IPPROTO_SCTP:
		binary.BigEndian.PutUint16(b, p.sport)
		binary.BigEndian.PutUint16(b[2:], p.dport)
		if p.chunk != chunkINIT {
			b[7] = 1 // tag
		}
		b[12], b[15] = p.chunk, 4
	}
}

// read returns what a program has made of the packet. In an error it reads the quoted packet's tuple; outer is the
// tuple of the packet itself.
func (p *randomPacket) read(frame []byte) (t tuple, outer tuple) {
	header := ipHeaderLen(p.v6)
	outer = p.readAt(frame[etherLen:])
	if !p.isError {
		return outer, outer
	}
	return p.readAt(frame[etherLen+header+8:]), outer
}

func (p *randomPacket) readAt(b []byte) tuple {
	t := tuple{v6: p.v6, proto: p.proto}
	addrs, size := b[12:20], 4
	if p.v6 {
		addrs, size = b[8:40], 16
	}
	t.src, t.dst = placeOf(p.v6, addrs[:size]), placeOf(p.v6, addrs[size:])
	l4 := b[ipHeaderLen(p.v6):]
	switch p.proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		t.sport, t.dport = binary.BigEndian.Uint16(l4), binary.BigEndian.Uint16(l4[2:])
	case unix.IPPROTO_ICMP:
		if t.sport = binary.BigEndian.Uint16(l4[4:]); p.reply {
			t.sport, t.dport = 0, t.sport
		}
	}
	return t
}

func pick[T any](random *rand.Rand, from ...T) T { return from[random.IntN(len(from))] }

var (
	podPorts    = []uint16{80, 90, 4000, 20001}
	remotePorts = []uint16{80, 5000, 20003}
	// The masquerading ports of the test are 20000 to 20007; of these, 20003 and 20005 are host ports as well.
	nodePorts = []uint16{20000, 20001, 20002, 20003, 20004, 20005, 20006, 20007, 8080, 8081, 40000}
)

func portsOf(p place) []uint16 {
	switch {
	case p.isPod():
		return podPorts
	case p.isNode() || p == placeLoopback:
		return nodePorts
	default:
		return remotePorts
	}
}

// randomBetween returns a packet from one of the sources to one of the destinations, or an error about one that
// goes the other way. errorsOf are the senders of errors.
func randomBetween(random *rand.Rand, from, to, errorsOf []place) (p randomPacket) {
	p.v6 = random.IntN(2) == 0
	p.proto = pick[uint8](random, unix.IPPROTO_TCP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_SCTP, unix.IPPROTO_GRE)
	p.src, p.dst = pick(random, from...), pick(random, to...)
	if errorsOf != nil && random.IntN(12) == 0 {
		p.isError, p.sender = true, pick(random, errorsOf...)
		p.src, p.dst = p.dst, p.src
	}
	switch p.proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		p.sport, p.dport = pick(random, portsOf(p.src)...), pick(random, portsOf(p.dst)...)
		p.flags = pick[uint8](random, flagSYN, flagSYN, flagSYN|flagACK, flagACK, flagACK, flagACK, flagFIN|flagACK, flagRST, flagRST|flagACK, uint8(random.IntN(64)))
		p.seq, p.ack = uint32(1000+random.IntN(4)), uint32(1000+random.IntN(4))
	case unix.IPPROTO_ICMP:
		if p.reply = random.IntN(2) == 0; p.reply {
			p.dport = pick(random, portsOf(p.dst)...)
		} else {
			p.sport = pick(random, portsOf(p.src)...)
		}
	case unix.IPPROTO_SCTP:
		p.sport, p.dport = pick(random, portsOf(p.src)...), pick(random, portsOf(p.dst)...)
		p.chunk = pick[uint8](random, 0, 0, chunkINIT, chunkABORT)
	}
	return p
}

// testRun runs a program as ebpf.Program.Run does, with less work.
type testRun struct {
	FD, Verdict     uint32
	SizeIn, SizeOut uint32
	In, Out         uint64
	Repeat, _       uint32
	CtxIn, _        uint32
	Ctx, _          uint64
	_, _, _, _      uint32
}

func (r *testRun) run(program *ebpf.Program, ifindex, ingress uint32, in, out []byte) (uint32, []byte, error) {
	const progTestRun = 10

	ctx := [48]uint32{9: ingress, 10: ifindex}
	*r = testRun{
		FD: uint32(program.FD()), SizeIn: uint32(len(in)), SizeOut: uint32(len(out)),
		In: uint64(uintptr(unsafe.Pointer(&in[0]))), Out: uint64(uintptr(unsafe.Pointer(&out[0]))),
		CtxIn: 44, Ctx: uint64(uintptr(unsafe.Pointer(&ctx))),
	}
	_, _, errno := unix.Syscall(unix.SYS_BPF, progTestRun, uintptr(unsafe.Pointer(r)), unsafe.Sizeof(*r))
	runtime.KeepAlive(in)
	runtime.KeepAlive(out)
	runtime.KeepAlive(&ctx)
	if errno != 0 {
		return 0, nil, errno
	}
	return r.Verdict, out[:r.SizeOut], nil
}
