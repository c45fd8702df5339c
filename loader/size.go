package loader

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Bounds of the default number of flows: enough for a small machine, and the default
// size of a busy node's conntrack table.
const (
	minFlows = 1 << 14
	maxFlows = 1 << 19
)

// flowsFor returns the number of flows that take about a thousandth of the memory.
func flowsFor(memory uint64) uint32 {
	const flowSize = uint64(unsafe.Sizeof(bpf.FlowEntry{}) + unsafe.Sizeof(bpf.FlowBucket{})/uintptr(flowWays))

	return uint32(min(max(memory/1024/flowSize, minFlows), maxFlows))
}

// MaxFlows returns the number of places in flow_table.
func (d *Datapath) MaxFlows() int { return int(d.Config.FlowBuckets * flowWays) }

// memory returns the host's memory in bytes, or 0 if it is unknown.
func memory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
