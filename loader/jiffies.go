package loader

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// Clock converts the kernel's jiffies, the unit of time in the forwarding cache.
type Clock struct {
	Now   uint32 // the lower half, as programs keep it
	Jiffy time.Duration
}

// ReadClock reads jiffies by a program, because no file has the number on every host.
func ReadClock() (c Clock, err error) {
	raiseMemlock()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "jiffies",
		Type:         ebpf.SchedCLS,
		Instructions: asm.Instructions{asm.FnJiffies64.Call(), asm.Return()},
		License:      "Dual BSD/GPL",
	})
	if err != nil {
		return Clock{}, fmt.Errorf("load a program that reads jiffies: %w", err)
	}
	defer program.Close()

	const shortestFrame = 14
	if c.Now, err = program.Run(&ebpf.RunOptions{Data: make([]byte, shortestFrame)}); err != nil {
		return Clock{}, fmt.Errorf("read jiffies: %w", err)
	}
	c.Jiffy, err = jiffy()
	return c, err
}

func jiffy() (time.Duration, error) {
	var resolution unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &resolution); err != nil {
		return 0, fmt.Errorf("read how long a jiffy is: %w", err)
	}
	return time.Duration(resolution.Nano()), nil
}

// cacheJiffies returns how long the forwarding cache keeps a decision: 50 jiffies, or so long that it and the jiffy in which
// the stack's hooks are not read again are over after 200 ms.
func cacheJiffies(jiffy time.Duration) uint32 {
	return uint32(min(50, 200*time.Millisecond/jiffy-1))
}

// Since returns how long ago a moment was, up to 2^31 jiffies (25 days at 1000 Hz), or 0 if it is later than now.
func (c Clock) Since(then uint32) time.Duration {
	return time.Duration(max(int32(c.Now-then), 0)) * c.Jiffy
}
