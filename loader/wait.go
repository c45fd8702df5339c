package loader

import (
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// WaitForPrograms waits for the programs that now run.
func WaitForPrograms() error {
	const global = 1 // MEMBARRIER_CMD_GLOBAL: waits for RCU

	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno == 0 {
		return nil
	}
	if err := waitByUpdate(); err != nil { // hosts with nohz_full refuse the call
		return fmt.Errorf("wait for running programs: %w", err)
	}
	return nil
}

// waitByUpdate updates a map of maps, which waits for programs (Linux 5.0, maybe_wait_bpf_programs).
func waitByUpdate() error {
	raiseMemlock()
	spec := &ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	outer, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: spec})
	if err != nil {
		return err
	}
	defer outer.Close()
	inner, err := ebpf.NewMap(spec)
	if err != nil {
		return err
	}
	defer inner.Close()
	return outer.Put(uint32(0), inner)
}
