package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// Packet is a packet as a hook receives it, for a test run.
type Packet struct {
	Frame   []byte
	Device  int    // of the hook
	Ingress int    // the device that has received the packet (since Linux 6.1); 0: the host's own
	Tag     uint32 // tc_index, from another hook
	Tunnel  Tunnel // that has received the packet
}

// Tunnel is the metadata of a packet that a tunnel has received. The zero value is for other devices.
type Tunnel struct {
	Remote netip.Addr // the sender of the outer packet
	VNI    uint32
}

// Verdicts of the programs, as the kernel returns them.
const (
	VerdictDrop     uint32 = 2
	VerdictRedirect uint32 = 7
)

// skBuff is struct __sk_buff. The kernel accepts only some fields from a test run, and requires that the others are 0.
type skBuff struct {
	_              [9]uint32
	IngressIfindex uint32
	Ifindex        uint32
	_              uint32
	CB             [5]uint32
	_              [31]uint32
}

// errPrepare is for a packet that could not be made as a hook receives it.
var errPrepare = errors.New("the kernel refuses to make such a packet: a tunnel's packet needs Linux 6.0")

// TestRun runs a program on a packet, which is not sent, and returns its verdict and the packet afterwards. The
// devices are those of the calling thread's network namespace. A packet that the program clones is sent.
func TestRun(program *ebpf.Program, p Packet) (verdict uint32, frame []byte, err error) {
	if p.Tag == 0 && p.Tunnel == (Tunnel{}) {
		verdict, _, frame, err = testRun(program, p)
	} else {
		verdict, _, frame, err = TestRunTagged(program, p)
	}
	return verdict, frame, err
}

// TestRunTagged runs a program on a packet with a tag, and also returns the tag that the packet has afterwards.
func TestRunTagged(program *ebpf.Program, p Packet) (verdict, tag uint32, frame []byte, err error) {
	programs, preparing, err := newPreparing(p)
	if err != nil {
		return 0, 0, nil, fmt.Errorf("load the program that prepares packets (on arm64, it needs Linux 6.0): %w", err)
	}
	defer programs.Close() // which empties it
	defer preparing.Close()
	if err := programs.Put(uint32(0), program); err != nil {
		return 0, 0, nil, err
	}
	verdict, tag, frame, err = testRun(preparing, p)
	if err == nil && verdict == notPrepared {
		err = errPrepare
	}
	return verdict, tag, frame, err
}

// testRun runs a program. It also returns the first word of the packet's cb.
func testRun(program *ebpf.Program, p Packet) (verdict, word uint32, frame []byte, err error) {
	const growth = 2048 // of the packet, by programs and by queued fragments

	var after skBuff
	options := ebpf.RunOptions{
		Data: p.Frame, DataOut: make([]byte, len(p.Frame)+growth),
		Context: skBuff{Ifindex: uint32(p.Device), IngressIfindex: uint32(p.Ingress)}, ContextOut: &after,
	}
	verdict, err = program.Run(&options)
	return verdict, after.CB[0], options.DataOut, err
}

// notPrepared is a verdict of the program that prepares packets. No other returns it.
const notPrepared uint32 = 99

// newPreparing returns a program that sets the tag and the tunnel, which the kernel does not take from a test run, runs
// the program in the map, and copies the tag to cb, which the kernel returns. A tail call ends only the function that
// makes it, and the kernel requires that BTF describes that.
func newPreparing(p Packet) (programs *ebpf.Map, preparing *ebpf.Program, err error) {
	const tcIndex, cb = 44, 48 // in struct __sk_buff

	programs, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, nil, err
	}
	function := func(name string) *btf.Func {
		return &btf.Func{Name: name, Type: &btf.FuncProto{
			Return: &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed},
			Params: []btf.FuncParam{{Name: "skb", Type: &btf.Pointer{Target: &btf.Void{}}}},
		}}
	}
	instructions := asm.Instructions{
		btf.WithFuncMetadata(asm.Mov.Reg(asm.R6, asm.R1).WithSymbol("prepare"), function("prepare")),
		asm.Mov.Imm(asm.R2, int32(p.Tag)),
		asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
		asm.Mov.Imm(asm.R0, 0),
	}
	if p.Tunnel != (Tunnel{}) {
		instructions = append(instructions, p.Tunnel.set()...)
	}
	instructions = append(instructions,
		asm.JNE.Imm(asm.R0, 0, "failed"),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Call.Label("run"),
		asm.LoadMem(asm.R1, asm.R6, tcIndex, asm.Word),
		asm.StoreMem(asm.R6, cb, asm.R1, asm.Word),
		asm.Return(),
		asm.Mov.Imm(asm.R0, int32(notPrepared)).WithSymbol("failed"),
		asm.Return(),
		btf.WithFuncMetadata(asm.LoadMapPtr(asm.R2, programs.FD()).WithSymbol("run"), function("run")),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, int32(notPrepared)),
		asm.Return(),
	)
	preparing, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: instructions})
	if err != nil {
		programs.Close()
		return nil, nil, err
	}
	return programs, preparing, nil
}

// set returns instructions that give the packet in R1 the tunnel's metadata. They return 0 in R0, or an error. The helper
// is the one for packets that a tunnel sends: bpf_skb_get_tunnel_key reads the local address as the remote one.
func (t Tunnel) set() asm.Instructions {
	const size, local = 44, 28 // of struct bpf_tunnel_key, and where local_ipv4 is

	var key [48]byte
	binary.NativeEndian.PutUint32(key[:], t.VNI)
	flags := int32(0)
	if t.Remote.Is6() {
		ip := t.Remote.As16()
		copy(key[local:], ip[:])
		flags = unix.BPF_F_TUNINFO_IPV6
	} else if t.Remote.Is4() {
		ip := t.Remote.As4()
		binary.NativeEndian.PutUint32(key[local:], binary.BigEndian.Uint32(ip[:]))
	}
	var instructions asm.Instructions
	for i := 0; i < len(key); i += 4 {
		word := int32(binary.NativeEndian.Uint32(key[i:]))
		instructions = append(instructions, asm.Mov.Imm32(asm.R2, word), asm.StoreMem(asm.RFP, int16(i-len(key)), asm.R2, asm.Word))
	}
	return append(instructions,
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, int32(-len(key))),
		asm.Mov.Imm(asm.R3, size), asm.Mov.Imm(asm.R4, flags), asm.FnSkbSetTunnelKey.Call())
}
