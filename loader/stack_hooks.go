package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// kernelTypes returns the types of the kernel, and whether programs can read all that bpf/stack_hooks.h reads: the kernel
// has BTF, functions by which a program gets at its structures (Linux 6.2, with a JIT compiler), and a table of devices (6.6).
var kernelTypes = sync.OnceValues(func() (*btf.Spec, bool) {
	types, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, false
	}
	net, ok := structWith(types, "net", "dev_by_index")
	return types, ok && callsKernel(types, net) == nil
})

// structWith returns a structure of the kernel, and whether there is one with that member.
func structWith(types *btf.Spec, name, member string) (s *btf.Struct, ok bool) {
	ok = types.TypeByName(name, &s) == nil && slices.ContainsFunc(s.Members, func(m btf.Member) bool { return m.Name == member })
	return s, ok
}

// callsKernel loads a program that calls the functions and reads what the first returns, for which CAP_BPF is not enough.
func callsKernel(types *btf.Spec, net *btf.Struct) error {
	netID, err := types.TypeID(net)
	if err != nil {
		return err
	}
	toContext, err := callOf(types, "bpf_cast_to_kern_ctx")
	if err != nil {
		return err
	}
	toAddress, err := callOf(types, "bpf_rdonly_cast")
	if err != nil {
		return err
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		toContext,
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
		asm.Mov.Imm(asm.R2, int32(netID)),
		toAddress,
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
	}})
	if err != nil {
		return err
	}
	return program.Close()
}

func callOf(types *btf.Spec, name string) (asm.Instruction, error) {
	var function *btf.Func
	if err := types.TypeByName(name, &function); err != nil {
		return asm.Instruction{}, err
	}
	id, err := types.TypeID(function)
	call := asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoKfuncCall, Constant: int64(id)}
	return call, err
}

// withoutKernelCalls replaces each call of a kernel function by a harmless one, because some kernels refuse such a call
// although it is never reached.
func withoutKernelCalls(programs map[string]*ebpf.ProgramSpec) map[string]*ebpf.ProgramSpec {
	changed := map[string]*ebpf.ProgramSpec{}
	for name, program := range programs {
		changed[name] = program.Copy()
		for i, instruction := range changed[name].Instructions {
			if instruction.IsKfuncCall() {
				changed[name].Instructions[i] = asm.FnKtimeGetNs.Call()
			}
		}
	}
	return changed
}

// SeesConntrack reports whether the loaded programs can read conntrack's entries, and so repeat what the host's rules
// translate. The kernel has their types also where nf_conntrack is a module that is not loaded yet.
func (d *Datapath) SeesConntrack() bool {
	types, err := btf.LoadKernelSpec()
	if err != nil || d.Config.SeesHooks == 0 {
		return false
	}
	_, ok := structWith(types, "nf_conn", "tuplehash")
	return ok
}

// StackHooks returns what the host's stack has at a device for forwarded packets of a family, as the loaded programs see
// it. Programs of older versions do not look, as if the kernel showed nothing.
func (d *Datapath) StackHooks(device int, ipv6 bool) (bpf.StackHook, error) {
	program, err := openProgram(d.dir.progPin(d.Config.Build, bpf.ProgStackHooks))
	if errors.Is(err, fs.ErrNotExist) {
		return bpf.HookUnknown, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open the program that looks for the stack's hooks: %w", err)
	}
	defer program.Close()

	const etherType, headers = 12, 14 + 40
	frame := make([]byte, headers)
	frame[etherType] = unix.ETH_P_IP >> 8
	if ipv6 {
		frame[etherType], frame[etherType+1] = unix.ETH_P_IPV6>>8, unix.ETH_P_IPV6&0xff
	}
	raiseMemlock() // for the library's probe, before Linux 5.11
	found, _, err := TestRun(program, Packet{Frame: frame, Device: device})
	if err != nil {
		return 0, fmt.Errorf("look for the stack's hooks: %w", err)
	}
	return bpf.StackHook(found), nil
}
