package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"math"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Programs of older versions do not note in moved_flows which flows they give other ports than the first candidate. So
// while some may run, each flow may be such a one; and once all are replaced, each flow of before.

// distrustMoved is for new programs that share the maps with old ones from now on. moved is nil if they do not know the
// map.
func distrustMoved(moved *ebpf.Map) error {
	if moved == nil {
		return nil
	}
	return fillMoved(moved, math.MaxUint32)
}

// trustMoved is for when all programs are those in use.
func (d *Datapath) trustMoved() error {
	const tickShift, epoch = 30, 1 << 30 // bpf/time.h, MASQ_PROBES_EPOCH in bpf/abi.h

	moved, err := ebpf.LoadPinnedMap(d.dir.mapPin(bpf.MapMovedFlows), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open map %s: %w", bpf.MapMovedFlows, err)
	}
	defer moved.Close()
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	return fillMoved(moved, epoch+uint32(now.Nano()>>tickShift))
}

// fillMoved sets the time at which flows of any tuple were seen behind their first candidate.
func fillMoved(moved *ebpf.Map, seen uint32) error {
	keys, values := make([]uint32, moved.MaxEntries()), make([]uint32, moved.MaxEntries())
	for i := range keys {
		keys[i], values[i] = uint32(i), seen
	}
	if _, err := moved.BatchUpdate(keys, values, nil); err != nil {
		return fmt.Errorf("fill map %s: %w", bpf.MapMovedFlows, err)
	}
	return nil
}
