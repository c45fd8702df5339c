package trace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// Seen is a real packet, as a device of the host had it.
type Seen struct {
	Time    time.Time `json:"time"`
	Device  string    `json:"device"`
	Leaving bool      `json:"leaving"` // after the programs; else before them
	Flags   string    `json:"flags,omitempty"`
	Bytes   int       `json:"bytes"` // of the frame; several segments may be in one
	// LeftOut are the packets before this one that were not told, because there were too many. Others' may be among
	// them, where the socket had no room.
	LeftOut uint64 `json:"leftOut"`
}

// perSecond bounds what is told: each packet takes a look at all entries.
const perSecond = 10

// Live tells the way of each real packet between two ends, in both directions, until ctx is done. What a device
// receives is traced, as a packet that is like it; of what leaves, the packet itself is told. The packets are read
// by a socket, which the kernel closes with the process: the datapath knows nothing of it.
func Live(ctx context.Context, attachments []*operator.Attachment, o Options, each func(*Trace) error) error {
	w, err := newWalk(ctx, attachments)
	if err != nil {
		return err
	}
	defer w.close()
	fd, err := listen(o.filterAddresses())
	if err != nil {
		return err
	}
	defer unix.Close(fd)

	l := &listener{walker: w, options: o, fd: fd, local: map[netip.Addr]bool{}}
	for ctx.Err() == nil {
		told, err := l.next()
		if err != nil {
			return err
		}
		if told == nil {
			continue
		}
		if err := each(told); err != nil {
			return err
		}
	}
	return nil
}

// filterAddresses returns addresses of which each packet between the ends has one. There are none if an end has none,
// because those of the other one may be translated.
func (o Options) filterAddresses() []netip.Addr {
	from, to := o.From.addresses(), o.To.addresses()
	if len(from) == 0 || len(to) == 0 {
		return nil
	}
	return append(from, to...)
}

// addresses returns the addresses of a container, or the one address: none of the host and the outside.
func (e End) addresses() (list []netip.Addr) {
	for _, a := range e.Container {
		for _, address := range a.Addresses {
			list = append(list, address.Address)
		}
	}
	if e.Address.IsValid() {
		list = append(list, e.Address)
	}
	return list
}

// listen opens a socket that receives all packets from or to one of some addresses, on all devices.
func listen(addresses []netip.Addr) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0) // it receives nothing yet
	if err != nil {
		return -1, fmt.Errorf("open a packet socket: %w", err)
	}
	filter := filterOf(addresses)
	protocols := uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8&0xff)
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		protocols = unix.ETH_P_ALL
	}
	wait := unix.Timeval{Usec: 200_000} // to look whether the command is to end
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocols}),
	)
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen to packets: %w", err)
	}
	return fd, nil
}

// filterOf returns a classic BPF program that passes packets from or to one of some addresses, or all if there is none,
// and 256 bytes of each.
func filterOf(addresses []netip.Addr) []unix.SockFilter {
	const load, equal, give, network, most = 0x20, 0x15, 0x06, 0xfff00000, 256 // BPF_LD|W|ABS, BPF_JEQ, BPF_RET, SKF_NET_OFF
	var filter []unix.SockFilter
	if len(addresses) == 0 {
		return []unix.SockFilter{{Code: give, K: most}}
	}
	slices.SortFunc(addresses, netip.Addr.Compare) // IPv4 first: a load behind the end of a packet ends the filter
	for _, addr := range addresses {
		words := addr.AsSlice()
		offsets := []uint32{12, 16}
		if addr.Is6() {
			offsets = []uint32{8, 24}
		}
		for _, offset := range offsets {
			n := len(words) / 4
			for i := range n {
				filter = append(filter,
					unix.SockFilter{Code: load, K: network + offset + uint32(4*i)},
					unix.SockFilter{Code: equal, Jf: uint8(2*(n-i) - 1), K: binary.BigEndian.Uint32(words[4*i:])})
			}
			filter = append(filter, unix.SockFilter{Code: give, K: most})
		}
	}
	return append(filter, unix.SockFilter{Code: give})
}

// listener reads real packets.
type listener struct {
	*walker
	options Options
	fd      int
	began   time.Time           // this second
	told    int                 // in it
	local   map[netip.Addr]bool // whether addresses are the host's, as known in it
	toPorts []uint16            // of TO, before and after the translation of host ports; nil: any
	leftOut uint64
}

// next returns what is to be told of the next packet; nil: nothing.
func (l *listener) next() (*Trace, error) {
	buffer := make([]byte, 512)
	n, from, err := unix.Recvfrom(l.fd, buffer, unix.MSG_TRUNC)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENETDOWN) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("receive a packet: %w", err)
	}
	at, isLink := from.(*unix.SockaddrLinklayer)
	p, ok := parse(buffer[:min(n, len(buffer))])
	if err := l.renew(); err != nil {
		return nil, err
	}
	if !isLink || !ok || !l.isWanted(p) || !l.isTold(at) {
		return nil, nil
	}
	if l.told++; l.told > perSecond {
		l.leftOut++
		return nil, nil
	}
	seen := &Seen{Time: time.Now(), Device: l.linkName(at.Ifindex), Leaving: at.Pkttype == unix.PACKET_OUTGOING, Flags: flagsText(p), Bytes: n}
	if seen.LeftOut, err = l.takeLeftOut(); err != nil {
		return nil, err
	}
	return l.tellSeen(p, at.Ifindex, seen)
}

// takeLeftOut returns how many packets were left out since the last call.
func (l *listener) takeLeftOut() (uint64, error) {
	socket, err := unix.GetsockoptTpacketStats(l.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS) // which clears them
	if err != nil {
		return 0, fmt.Errorf("read how many packets the socket had no room for: %w", err)
	}
	n := l.leftOut + uint64(socket.Drops)
	l.leftOut = 0
	return n, nil
}

// renew begins another second, and reads anew what tells which packets are wanted.
func (l *listener) renew() error {
	if time.Since(l.began) < time.Second {
		return nil
	}
	l.began, l.told, l.toPorts = time.Now(), 0, nil
	clear(l.local)
	if err := l.read(); err != nil || l.options.ToPort == 0 {
		return err
	}
	l.toPorts = []uint16{l.options.ToPort}
	for _, port := range l.ports {
		if l.isToPort(port.HostPort) || l.isToPort(port.ContainerPort) {
			l.toPorts = append(l.toPorts, port.HostPort, port.ContainerPort)
		}
	}
	return nil
}

// tellSeen traces a packet that a device has received, and only names others.
func (l *listener) tellSeen(p packet, device int, seen *Seen) (*Trace, error) {
	t := &Trace{Protocol: strings.TrimSuffix(p.protocol.String(), "v6"), Seen: seen}
	l.way = &Way{Source: maps.AddrPortText(p.src), Destination: maps.AddrPortText(p.dst), Steps: []Step{}}
	t.Request = l.way
	if seen.Leaving {
		l.arrives(p, End{})
		return t, l.end(Sent, "leaves by %s", seen.Device)
	}
	flags := p.tcpFlags &^ (tcpFIN | tcpRST) // a program would send conntrack a copy of an end
	if err := errors.Join(l.read(), l.fill(&p)); err != nil {
		return nil, err
	}
	p.tcpFlags, l.outside = flags, 0
	source, destination := p.frame[6:12], p.frame[:6]
	p.build(source, destination)
	if _, isUplink := l.uplinks[device]; isUplink {
		return t, l.fromUplink(p, device, 0)
	}
	return t, l.fromContainer(p, device)
}

// isTold returns whether what a device had is told: what another one than ours receives, ours has, too.
func (l *listener) isTold(at *unix.SockaddrLinklayer) bool {
	_, isContainer := l.devices[at.Ifindex]
	_, isUplink := l.uplinks[at.Ifindex]
	return at.Pkttype == unix.PACKET_OUTGOING || isContainer || isUplink
}

// isWanted returns whether a packet goes between the two ends, in either direction.
func (l *listener) isWanted(p packet) bool {
	if p.protocol != protocolOf(l.options.Protocol, p.src.Addr().Is6()) || !l.isPort(p.src.Port()) && !l.isPort(p.dst.Port()) {
		return false // which is known without a look at the addresses
	}
	return l.isWay(p.protocol, p.src, p.dst) || l.isWay(p.protocol, p.dst, p.src)
}

// isPort returns whether a port may be that of TO, before or after the translation of a host port.
func (l *listener) isPort(port uint16) bool {
	return l.toPorts == nil || slices.Contains(l.toPorts, port)
}

// isWay returns whether what goes from one side to another goes from FROM to TO. Masqueraded, it comes from the host.
func (l *listener) isWay(protocol maps.Protocol, from, to netip.AddrPort) bool {
	isMasqueraded := !l.options.From.Outside && l.isLocal(from.Addr())
	return l.isTo(protocol, to) && (isMasqueraded || l.isAt(l.options.From, from.Addr()))
}

// isTo returns whether a side is TO, or what a host port makes of it, or one that is for it.
func (l *listener) isTo(protocol maps.Protocol, side netip.AddrPort) bool {
	to := l.options.To
	if l.isAt(to, side.Addr()) && l.isToPort(side.Port()) {
		return true
	}
	for _, port := range l.ports {
		if port.Protocol != protocol {
			continue
		}
		isBefore := side.Port() == port.HostPort && l.isOpenAt(port, side.Addr())
		isAfter := side.Port() == port.ContainerPort && side.Addr() == port.ContainerAddr
		if isBefore && l.isAt(to, port.ContainerAddr) && l.isToPort(port.ContainerPort) ||
			isAfter && (to.Host || l.isOpenAt(port, to.Address)) && l.isToPort(port.HostPort) {
			return true
		}
	}
	return false
}

func (l *listener) isToPort(port uint16) bool {
	return l.options.ToPort == 0 || port == l.options.ToPort
}

// isOpenAt returns whether a host port is open at an address.
func (l *listener) isOpenAt(port maps.HostPort, addr netip.Addr) bool {
	return port.HostAddr == addr || port.HostAddr.IsUnspecified() && port.HostAddr.Is4() == addr.Is4() && l.isLocal(addr)
}

func (l *listener) isAt(e End, addr netip.Addr) bool {
	if e.Host || e.Outside {
		_, isContainer := l.endpoints[addr]
		return !isContainer && l.isLocal(addr) == e.Host
	}
	return slices.Contains(e.addresses(), addr)
}

// isLocal returns whether an address is the host's.
func (l *listener) isLocal(addr netip.Addr) bool {
	isLocal, isKnown := l.local[addr]
	if !isKnown && addr.IsValid() {
		route, err := l.routeTo(addr)
		isLocal = err == nil && route.Type == unix.RTN_LOCAL
		l.local[addr] = isLocal
	}
	return isLocal
}
