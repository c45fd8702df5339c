package loader

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Packet is a packet as a hook receives it, for a test run.
type Packet struct {
	Frame   []byte
	Device  int    // whose hook it is
	Ingress int    // the device that has received the packet (since Linux 6.1); 0: the host's own
	Tag     uint32 // tc_index, from another hook
}

// Verdicts of the programs, as the kernel returns them.
const (
	VerdictDrop     uint32 = 2
	VerdictRedirect uint32 = 7
)

// skBuff is the head of struct __sk_buff. The kernel accepts only some fields from a test run, and wants the
// others to be 0.
type skBuff struct {
	_              [9]uint32
	IngressIfindex uint32
	Ifindex        uint32
	_              uint32
	CB             [5]uint32
}

// TestRun runs a program on a packet, which is not sent, and returns its verdict and the packet afterwards. The
// devices are those of the calling thread's network namespace. A packet that the program clones is sent.
func TestRun(program *ebpf.Program, p Packet) (verdict uint32, frame []byte, err error) {
	const room = 2048 // for programs that grow the packet, and for queued fragments

	context := skBuff{Ifindex: uint32(p.Device), IngressIfindex: uint32(p.Ingress)}
	options := ebpf.RunOptions{Data: p.Frame, DataOut: make([]byte, len(p.Frame)+room)}
	if p.Tag != 0 {
		programs, setter, err := newTagSetter()
		if err != nil {
			return 0, nil, fmt.Errorf("load the program that sets tc_index: %w", err)
		}
		defer programs.Close() // which empties it
		defer setter.Close()
		if err := programs.Put(uint32(0), program); err != nil {
			return 0, nil, err
		}
		program, context.CB[0] = setter, p.Tag
	}
	options.Context = context
	verdict, err = program.Run(&options)
	return verdict, options.DataOut, err
}

// newTagSetter returns a program that takes tc_index from cb, and goes on with the program in the map: the kernel
// does not take tc_index from a test run.
func newTagSetter() (programs *ebpf.Map, setter *ebpf.Program, err error) {
	const tcIndex, cb, noProgram = 44, 48, 99 // offsets in struct __sk_buff; a verdict

	programs, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, nil, err
	}
	setter, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, cb, asm.Word),
		asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
		asm.LoadMapPtr(asm.R2, programs.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, noProgram),
		asm.Return(),
	}})
	if err != nil {
		programs.Close()
		return nil, nil, err
	}
	return programs, setter, nil
}
