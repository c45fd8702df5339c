package loader

import (
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Timeouts are the times after which an idle flow has no right to its
// masquerading port any more. 0 stands for netfilter's default
// (Documentation/networking/nf_conntrack-sysctl.rst), which is what users get.
type Timeouts struct {
	TCPOpening time.Duration // one side has sent; 2 minutes
	TCPOpen    time.Duration // both have; 5 days
	TCPClosing time.Duration // one side has ended; 2 minutes
	UDPOpening time.Duration // one side has sent; 30 seconds
	UDPOpen    time.Duration // both have; 2 minutes
	Other      time.Duration // ICMP echo and protocols without ports; 30 seconds
}

// ticks returns the timeouts in the unit of the datapath, 2^30 ns.
func (t Timeouts) ticks() bpf.DatapathTimeouts {
	of := func(asked, usual time.Duration) uint32 {
		if asked == 0 {
			asked = usual
		}
		return uint32(asked >> 30)
	}
	return bpf.DatapathTimeouts{
		TcpOpening: of(t.TCPOpening, 2*time.Minute),
		TcpOpen:    of(t.TCPOpen, 5*24*time.Hour),
		TcpClosing: of(t.TCPClosing, 2*time.Minute),
		UdpOpening: of(t.UDPOpening, 30*time.Second),
		UdpOpen:    of(t.UDPOpen, 2*time.Minute),
		Other:      of(t.Other, 30*time.Second),
	}
}
