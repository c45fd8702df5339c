package loader

import (
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Timeouts are the times after which an idle flow has no right to its
// masquerading port any more. 0 stands for netfilter's default
// (Documentation/networking/nf_conntrack-sysctl.rst), which is what users get.
type Timeouts struct {
	TCPUnreplied   time.Duration // one side has sent; 2 minutes
	TCPEstablished time.Duration // both have; 5 days
	TCPClosing     time.Duration // one side has ended; 2 minutes
	UDPUnreplied   time.Duration // one side has sent; 30 seconds
	UDPStream      time.Duration // both have; 2 minutes
	Other          time.Duration // ICMP echo and protocols without ports; 30 seconds
}

// ticks returns the timeouts in the unit of the datapath, 2^30 ns.
func (t Timeouts) ticks() bpf.Timeouts {
	of := func(asked, usual time.Duration) uint32 {
		if asked == 0 {
			asked = usual
		}
		return uint32(asked >> 30)
	}
	return bpf.Timeouts{
		TcpUnreplied:   of(t.TCPUnreplied, 2*time.Minute),
		TcpEstablished: of(t.TCPEstablished, 5*24*time.Hour),
		TcpClosing:     of(t.TCPClosing, 2*time.Minute),
		UdpUnreplied:   of(t.UDPUnreplied, 30*time.Second),
		UdpStream:      of(t.UDPStream, 2*time.Minute),
		Other:          of(t.Other, 30*time.Second),
	}
}
