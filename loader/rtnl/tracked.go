package rtnl

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Tracked is a connection that conntrack knows, by TCP or UDP. The sides differ between the directions if the host
// translates it.
type Tracked struct {
	Protocol uint8
	// Opener has opened it to Asked. Server has answered, to Client.
	Opener, Asked, Server, Client netip.AddrPort
}

// TrackedConnections lists the connections that conntrack knows in the calling thread's network namespace. It fails if the
// kernel lacks conntrack's netlink (nf_conntrack_netlink).
func TrackedConnections() (list []Tracked, err error) {
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			return nil, fmt.Errorf("list conntrack's connections: %w", explain(err))
		}
		for _, flow := range flows {
			sent, reply := flow.Forward, flow.Reverse
			if sent.Protocol == unix.IPPROTO_TCP || sent.Protocol == unix.IPPROTO_UDP {
				list = append(list, Tracked{sent.Protocol,
					sideOf(sent.SrcIP, sent.SrcPort), sideOf(sent.DstIP, sent.DstPort),
					sideOf(reply.SrcIP, reply.SrcPort), sideOf(reply.DstIP, reply.DstPort)})
			}
		}
	}
	return list, nil
}

func sideOf(ip net.IP, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr.Unmap(), port)
}
