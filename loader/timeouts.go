package loader

import (
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// defaultTimeouts are netfilter's (Documentation/networking/nf_conntrack-sysctl.rst).
var defaultTimeouts = [bpf.FlowStates]time.Duration{
	bpf.FlowSYNSent:     2 * time.Minute,
	bpf.FlowSYNRecv:     time.Minute,
	bpf.FlowEstablished: 5 * 24 * time.Hour,
	bpf.FlowFINWait:     2 * time.Minute,
	bpf.FlowCloseWait:   time.Minute,
	bpf.FlowLastACK:     30 * time.Second,
	bpf.FlowTimeWait:    2 * time.Minute,
	bpf.FlowClose:       10 * time.Second,
	bpf.FlowUDP:         30 * time.Second,
	bpf.FlowUDPStream:   2 * time.Minute,
	bpf.FlowICMP:        30 * time.Second,
	bpf.FlowOther:       10 * time.Minute,
}

// ticks returns the timeout of each state in the datapath's unit, 2^30 ns.
func ticks(timeouts map[bpf.FlowState]time.Duration) (ticks [bpf.FlowStates]uint32) {
	for state, timeout := range defaultTimeouts {
		if other, ok := timeouts[bpf.FlowState(state)]; ok {
			timeout = other
		}
		ticks[state] = uint32(timeout >> 30)
	}
	return ticks
}
