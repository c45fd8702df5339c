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
