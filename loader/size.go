package loader

import "golang.org/x/sys/unix"

// Bounds of the number of flows that is chosen by the host's memory: enough for
// a small machine, and what a busy node's conntrack table holds by default.
const (
	leastFlows = 1 << 14
	mostFlows  = 1 << 19
)

// flowsFor spends about a thousandth of the memory on flows.
func flowsFor(memory uint64) uint32 {
	const flowSize = 2 * 128 // key, value, and what the kernel keeps with them: in flows, and in established

	return uint32(min(max(memory/1024/flowSize, leastFlows), mostFlows))
}

// memory returns the host's memory in bytes, or 0 where it cannot be told.
func memory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
