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

// Programs of older versions do not record in moved_flows which flows have another port than the first candidate. So
// any flow may have one while older programs run, and afterwards any flow that they created.

// distrustMoved marks all of moved_flows before new programs share the maps with old ones. moved is nil if the new
// programs do not have the map.
func distrustMoved(moved *ebpf.Map) error {
	if moved == nil {
		return nil
	}
	return fillMoved(moved, math.MaxUint32)
}

// trustMoved replaces the marks by the present time, once all old programs are replaced.
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

// fillMoved sets the time at which flows of any tuple last had another port than their first candidate.
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
