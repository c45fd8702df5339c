package link

import (
	"net"
	"net/netip"
)

// PrefixOf converts an address with a mask, as in CNI results. The prefix is invalid if n has no address. An
// IPv4-mapped IPv6 address becomes IPv4.
func PrefixOf(n net.IPNet) netip.Prefix {
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits)
}

// Families reports which families the addresses have.
func Families(addresses []Address) (ipv4, ipv6 bool) {
	for _, address := range addresses {
		if address.IsIPv6() {
			ipv6 = true
		} else {
			ipv4 = true
		}
	}
	return ipv4, ipv6
}

// DefaultGateway returns the gateway of an address without one: a link-local address that only the container's own link
// uses.
func DefaultGateway(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1}) // RFC 3927
	}
	return hostLinkLocal
}
