package loader

import (
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Timeouts say how long an idle flow keeps its masquerading port. 0 is netfilter's
// default (Documentation/networking/nf_conntrack-sysctl.rst), which users get.
type Timeouts struct {
	TCPUnreplied   time.Duration // one side has sent; default 2 minutes
	TCPEstablished time.Duration // both sides have sent; 5 days
	TCPClosing     time.Duration // one side has closed; 2 minutes
	UDPUnreplied   time.Duration // one side has sent; 30 seconds
	UDPStream      time.Duration // both sides have sent; 2 minutes
	Other          time.Duration // ICMP echo and protocols without ports; 30 seconds
}

// ticks returns the timeouts in the datapath's unit, 2^30 ns.
func (t Timeouts) ticks() bpf.Timeouts {
	ticks := func(timeout, defaultTimeout time.Duration) uint32 {
		if timeout == 0 {
			timeout = defaultTimeout
		}
		return uint32(timeout >> 30)
	}
	return bpf.Timeouts{
		TcpUnreplied:   ticks(t.TCPUnreplied, 2*time.Minute),
		TcpEstablished: ticks(t.TCPEstablished, 5*24*time.Hour),
		TcpClosing:     ticks(t.TCPClosing, 2*time.Minute),
		UdpUnreplied:   ticks(t.UDPUnreplied, 30*time.Second),
		UdpStream:      ticks(t.UDPStream, 2*time.Minute),
		Other:          ticks(t.Other, 30*time.Second),
	}
}
