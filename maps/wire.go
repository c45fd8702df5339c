package maps

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// wireAddr returns an address in the maps' format: IPv4 as an IPv4-mapped IPv6 address.
func wireAddr(addr netip.Addr) bpf.Addr {
	return bpf.Addr{Bytes: addr.As16()}
}

func addrOf(wire bpf.Addr) netip.Addr {
	return netip.AddrFrom16(wire.Bytes).Unmap()
}

// wireOrZero returns zeros for an invalid address.
func wireOrZero(addr netip.Addr) bpf.Addr {
	if !addr.IsValid() {
		return bpf.Addr{}
	}
	return wireAddr(addr)
}

func addrOrNone(wire bpf.Addr) netip.Addr {
	if wire == (bpf.Addr{}) {
		return netip.Addr{}
	}
	return addrOf(wire)
}

const (
	setBits    = 32 // the set precedes the address
	mappedBits = 96 // precede an IPv4 address in its mapped form
)

// mapped returns a prefix in the maps' format.
func mapped(prefix netip.Prefix) netip.Prefix {
	bits := prefix.Bits()
	if prefix.Addr().Is4() {
		bits += mappedBits
	}
	return netip.PrefixFrom(netip.AddrFrom16(prefix.Addr().As16()), bits)
}

func prefixKey(set PrefixSet, prefix netip.Prefix) bpf.PrefixKey {
	return bpf.PrefixKey{
		Prefixlen: uint32(setBits + mapped(prefix).Bits()),
		Set:       uint32(set),
		Addr:      wireAddr(prefix.Addr()),
	}
}

// prefixOf is the inverse of prefixKey.
func prefixOf(key bpf.PrefixKey) netip.Prefix {
	addr, bits := addrOf(key.Addr), int(key.Prefixlen)-setBits
	if addr.Is4() {
		bits -= mappedBits
	}
	return netip.PrefixFrom(addr, bits)
}

// Protocol is an IP protocol number.
type Protocol uint8

// The protocols of host ports, of echo flows, and of rules.
const (
	TCP    Protocol = unix.IPPROTO_TCP
	UDP    Protocol = unix.IPPROTO_UDP
	SCTP   Protocol = unix.IPPROTO_SCTP
	ICMP   Protocol = unix.IPPROTO_ICMP
	ICMPv6 Protocol = unix.IPPROTO_ICMPV6
)

// String returns the name in lower case, as in CNI's portMappings.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	case ICMP:
		return "icmp"
	case ICMPv6:
		return "icmpv6"
	default:
		return fmt.Sprintf("protocol %d", uint8(p))
	}
}
