package loader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// Packet is a packet as a hook receives it, for a test run.
type Packet struct {
	Frame   []byte
	Device  int    // whose hook it is
	Ingress int    // the device that has received the packet (since Linux 6.1); 0: the host's own
	Tag     uint32 // tc_index, from another hook
	Tunnel  Tunnel // that has received the packet
}

// Tunnel is what a tunnel says about a packet that it has received. The zero value: it is no tunnel.
type Tunnel struct {
	Remote netip.Addr // the sender of the outer packet
	VNI    uint32
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
}

// errPrepare says that a packet could not be made as a hook receives it.
var errPrepare = errors.New("the kernel refuses to make such a packet: one of a tunnel needs Linux 6.0")

// TestRun runs a program on a packet, which is not sent, and returns its verdict and the packet afterwards. The
// devices are those of the calling thread's network namespace. A packet that the program clones is sent.
func TestRun(program *ebpf.Program, p Packet) (verdict uint32, frame []byte, err error) {
	const room = 2048 // for programs that grow the packet, and for queued fragments

	options := ebpf.RunOptions{
		Data: p.Frame, DataOut: make([]byte, len(p.Frame)+room),
		Context: skBuff{Ifindex: uint32(p.Device), IngressIfindex: uint32(p.Ingress)},
	}
	if p.Tag != 0 || p.Tunnel != (Tunnel{}) {
		programs, preparing, err := newPreparing(p)
		if err != nil {
			return 0, nil, fmt.Errorf("load the program that prepares packets: %w", err)
		}
		defer programs.Close() // which empties it
		defer preparing.Close()
		if err := programs.Put(uint32(0), program); err != nil {
			return 0, nil, err
		}
		program = preparing
	}
	verdict, err = program.Run(&options)
	if err == nil && verdict == notPrepared {
		err = errPrepare
	}
	return verdict, options.DataOut, err
}

// notPrepared is a verdict of the program that prepares packets. No other returns it.
const notPrepared uint32 = 99

// newPreparing returns a program that sets what the kernel does not take from a test run, and goes on with the program
// in the map.
func newPreparing(p Packet) (programs *ebpf.Map, preparing *ebpf.Program, err error) {
	const tcIndex = 44 // in struct __sk_buff

	programs, err = ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return nil, nil, err
	}
	instructions := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, int32(p.Tag)),
		asm.StoreMem(asm.R1, tcIndex, asm.R2, asm.Word),
	}
	if p.Tunnel != (Tunnel{}) {
		instructions = append(instructions, p.Tunnel.set()...)
		instructions = append(instructions, asm.JNE.Imm(asm.R0, 0, "failed"))
	}
	preparing, err = ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: append(instructions,
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, programs.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, int32(notPrepared)).WithSymbol("failed"),
		asm.Return(),
	)})
	if err != nil {
		programs.Close()
		return nil, nil, err
	}
	return programs, preparing, nil
}

// set has the packet in R1 be one that a tunnel has received. R0 is 0, or an error. The helper is the one for what a
// tunnel sends, whose source is the remote for who reads it with bpf_skb_get_tunnel_key.
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
