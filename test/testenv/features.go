package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Features for [Require].
var (
	TCX     = Feature{Name: "tcx", Since: Version{6, 6}, Probe: probeTCX}
	BigTCP6 = Feature{Name: "BIG TCP for IPv6", Since: Version{5, 19}, Probe: probeBigTCP6}
	BigTCP4 = Feature{Name: "BIG TCP for IPv4", Since: Version{6, 3}, Probe: probeBigTCP4}

	FileMarks = Feature{Name: "extended attributes of tmpfs", Since: Version{6, 6}, Probe: probeFileMarks}

	LiveRename = Feature{Name: "renaming of a device that is up", Since: Version{6, 2}, Probe: probeLiveRename}

	MemoryGroups = Feature{Name: "BPF memory in cgroups", Since: Version{5, 11}, Probe: probeMemoryGroups}

	TrieBatches = Feature{Name: "batches of LPM tries", Since: Version{5, 13}, Probe: probeTrieBatches}

	Netkit = Feature{Name: "netkit", Module: "netkit", Probe: probeNetkit}

	VXLAN = Feature{Name: "VXLAN", Module: "vxlan", Probe: probeVXLAN}

	BridgeNetfilter = Feature{Name: "br_netfilter", Module: "br_netfilter", Probe: probeBridgeNetfilter}

	FIBSource = Feature{Name: "BPF_FIB_LOOKUP_SRC", Since: Version{6, 7}, Probe: probeFIBSource}

	TunnelSource = Feature{Name: "source in bpf_skb_set_tunnel_key", Since: Version{6, 0}, Probe: probeTunnelSource}

	// LegacyTables are iptables' own, before nftables.
	LegacyTables = Feature{Name: "legacy tables of iptables", Module: "ip6table_filter", Probe: probeLegacyTables}

	// VisibleHooks: programs can see what the stack does with forwarded packets.
	VisibleHooks = Feature{Name: "BTF of the table of devices", Since: Version{6, 6}, Probe: probeVisibleHooks}

	// IPVS: the kernel balances connections, as kube-proxy configures it in its mode ipvs.
	IPVS = Feature{Name: "IPVS", Module: "ip_vs", Probe: probeIPVS}

	Conntrack = Feature{Name: "conntrack's netlink", Module: "nf_conntrack_netlink", Probe: probeConntrack}
)

// loopback is the index of lo in every network namespace.
const loopback = 1

func probeTCX() (err error) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}, // TCX_NEXT.
		License:      "GPL",
	})
	if err != nil {
		return fmt.Errorf("load program: %w", err)
	}
	defer program.Close()
	attached, err := link.AttachTCX(link.TCXOptions{
		Interface: loopback, Program: program, Attach: ebpf.AttachTCXIngress,
	})
	if err != nil {
		return err
	}
	return attached.Close()
}

// A kernel with BIG TCP reports its limits as attributes of a device.

func probeBigTCP6() error {
	lo, err := netlink.LinkByIndex(loopback)
	if err == nil && lo.Attrs().TSOMaxSize == 0 {
		err = errors.New("devices have no tso_max_size")
	}
	return err
}

func probeBigTCP4() error {
	lo, err := netlink.LinkByIndex(loopback)
	if err == nil && lo.Attrs().GSOIPv4MaxSize == 0 {
		err = errors.New("devices have no gso_ipv4_max_size")
	}
	return err
}

// BridgeNetfilterSysctls turn br_netfilter on for each family.
var BridgeNetfilterSysctls = []string{"net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"}

func probeBridgeNetfilter() error {
	_, err := os.Stat("/proc/sys/" + BridgeNetfilterSysctls[0])
	return err
}

func probeLegacyTables() error {
	return inScratch(func() error {
		if out, err := exec.Command("ip6tables-legacy", "-S").CombinedOutput(); err != nil {
			return fmt.Errorf("ip6tables-legacy: %w: %s", err, out)
		}
		return nil
	})
}

func probeIPVS() error {
	return inScratch(func() error {
		if out, err := exec.Command("ipvsadm", "-L", "-n").CombinedOutput(); err != nil {
			return fmt.Errorf("ipvsadm: %w: %s", err, out)
		}
		return nil
	})
}

func probeVisibleHooks() error {
	types, err := btf.LoadKernelSpec()
	if err != nil {
		return err
	}
	var net *btf.Struct
	if err := types.TypeByName("net", &net); err != nil {
		return err
	}
	if !slices.ContainsFunc(net.Members, func(m btf.Member) bool { return m.Name == "dev_by_index" }) {
		return errors.New("struct net has no dev_by_index")
	}
	return nil
}

// probeNetkit adds a device in a temporary namespace.
func probeNetkit() error {
	return inScratch(func() error {
		device := &netlink.Netkit{LinkAttrs: netlink.LinkAttrs{Name: "probe"}, Mode: netlink.NETKIT_MODE_L3}
		return netlink.LinkAdd(device)
	})
}

func probeVXLAN() error {
	return inScratch(func() error {
		return netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "probe"}, VxlanId: 7, Port: 4789})
	})
}

// inScratch runs fn in a network namespace that ends with it.
func inScratch(fn func() error) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		return fn()
	})
}

func probeLiveRename() error {
	return inScratch(func() error {
		lo, err := netlink.LinkByIndex(loopback)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		return netlink.LinkSetName(lo, "probe")
	})
}

// probeMemoryGroups tests whether maps count in cgroups, or as locked memory of the process.
func probeMemoryGroups() error {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		return err
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 0, Max: old.Max}); err != nil {
		return err
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1 << 16})
	if err != nil {
		return err
	}
	return m.Close()
}

func probeTrieBatches() error {
	const noPrealloc = 1 // BPF_F_NO_PREALLOC
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LPMTrie, KeySize: 8, ValueSize: 4, MaxEntries: 1, Flags: noPrealloc})
	if err != nil {
		return err
	}
	defer m.Close()
	_, err = m.BatchUpdate([][8]byte{{}}, []uint32{0}, nil)
	return err
}

func probeFileMarks() error {
	return unix.Setxattr(tempDir, "user.probe", []byte("probe"), 0)
}

func probeConntrack() error {
	_, err := netlink.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	return err
}

// probeFIBSource looks up any route: kernels without the flag return EINVAL.
func probeFIBSource() error {
	const (
		size        = 64      // struct bpf_fib_lookup
		output, src = 2, 0x10 // flags
	)
	result, err := runWithZeros(size,
		asm.StoreImm(asm.RFP, -size, unix.AF_INET, asm.Byte),
		asm.StoreImm(asm.RFP, -size+8, loopback, asm.Word),
		asm.Mov.Imm(asm.R3, size), asm.Mov.Imm(asm.R4, output|src),
		asm.FnFibLookup.Call(),
	)
	if err == nil && result == -int32(unix.EINVAL) {
		err = errors.New("bpf_fib_lookup: EINVAL")
	}
	return err
}

// probeTunnelSource sets the key of a tunnel's packet, with a member that older kernels do not know.
func probeTunnelSource() error {
	const size = 48 // struct bpf_tunnel_key has 44 bytes
	result, err := runWithZeros(size, asm.Mov.Imm(asm.R3, 44), asm.Mov.Imm(asm.R4, 0), asm.FnSkbSetTunnelKey.Call())
	if err == nil && result != 0 {
		err = fmt.Errorf("bpf_skb_set_tunnel_key: %d", result)
	}
	return err
}

// runWithZeros runs a program that begins with R2 at so many zero bytes on its stack, and returns its result.
func runWithZeros(size int16, body ...asm.Instruction) (int32, error) {
	program := asm.Instructions{asm.Mov.Imm(asm.R2, 0)}
	for offset := -size; offset < 0; offset += 8 {
		program = append(program, asm.StoreMem(asm.RFP, offset, asm.R2, asm.DWord))
	}
	program = append(program, asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -int32(size)))
	program = append(append(program, body...), asm.Return())
	loaded, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, Instructions: program, License: "GPL"})
	if err != nil {
		return 0, err
	}
	defer loaded.Close()
	result, err := loaded.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
	return int32(result), err
}
