package maps

import (
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// clock converts the kernel's jiffies, by which the programs tell the time in the forwarding cache.
type clock struct {
	now   uint32 // the lower half, as programs keep it
	jiffy time.Duration
}

// readClock asks the kernel by a program, because no file has the number on each host.
func readClock() (c clock, err error) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "jiffies",
		Type:         ebpf.SocketFilter,
		Instructions: asm.Instructions{asm.FnJiffies64.Call(), asm.Return()},
		License:      "GPL",
	})
	if err != nil {
		return clock{}, fmt.Errorf("load a program that reads jiffies: %w", err)
	}
	defer program.Close()

	const shortestFrame = 14
	if c.now, err = program.Run(&ebpf.RunOptions{Data: make([]byte, shortestFrame)}); err != nil {
		return clock{}, fmt.Errorf("read jiffies: %w", err)
	}
	var resolution unix.Timespec
	if err := unix.ClockGetres(unix.CLOCK_MONOTONIC_COARSE, &resolution); err != nil {
		return clock{}, fmt.Errorf("read the length of a jiffy: %w", err)
	}
	c.jiffy = time.Duration(resolution.Nano())
	return c, nil
}

// since returns how long ago a moment was, at most 2^31 jiffies (25 days at 1000 Hz). One after now is now.
func (c clock) since(then uint32) time.Duration {
	return time.Duration(max(int32(c.now-then), 0)) * c.jiffy
}
