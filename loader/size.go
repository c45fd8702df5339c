package loader

import "golang.org/x/sys/unix"

// Bounds of the default number of flows: enough for a small machine, and the default
// size of a busy node's conntrack table.
const (
	minFlows = 1 << 14
	maxFlows = 1 << 19
)

// flowsFor spends about a thousandth of the memory on flows.
func flowsFor(memory uint64) uint32 {
	const (
		inFlows  = 40 + 48 + 64 // key, value and about what the kernel adds
		inBackup = 96
		flowSize = inFlows + inBackup
	)

	return uint32(min(max(memory/1024/flowSize, minFlows), maxFlows))
}

// memory returns the host's memory in bytes, or 0 if it is unknown.
func memory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
