package loader

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// KnowsRouteSource reports whether programs can look up the source address of a route
// (BPF_FIB_LOOKUP_SRC, 6.7). The probe looks up a route of a device that does not
// exist: an older kernel refuses the flag instead.
func KnowsRouteSource() (bool, error) {
	const (
		lookupSource = 1 << 4 // BPF_FIB_LOOKUP_SRC
		paramsSize   = 64     // struct bpf_fib_lookup
	)
	instructions := asm.Instructions{asm.Mov.Imm(asm.R2, 0)}
	for offset := int16(-paramsSize); offset < 0; offset += 8 {
		instructions = append(instructions, asm.StoreMem(asm.RFP, offset, asm.R2, asm.DWord))
	}
	instructions = append(instructions,
		asm.StoreImm(asm.RFP, -paramsSize, unix.AF_INET, asm.Byte),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -paramsSize),
		asm.Mov.Imm(asm.R3, paramsSize),
		asm.Mov.Imm(asm.R4, lookupSource),
		asm.FnFibLookup.Call(),
		asm.Return(),
	)
	raiseMemlock()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "probe_source", Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: instructions,
	})
	if err != nil {
		return false, fmt.Errorf("probe the kernel for source addresses of routes: %w", err)
	}
	defer program.Close()

	const ethernetHeader = 14
	result, _, err := program.Test(make([]byte, ethernetHeader))
	if err != nil {
		return false, fmt.Errorf("probe the kernel for source addresses of routes: %w", err)
	}
	return int32(result) != -int32(unix.EINVAL), nil
}
