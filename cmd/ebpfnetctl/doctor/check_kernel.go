package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin"
)

// lookKernel tries what the datapath needs, whatever the kernel's version is.
func lookKernel(context.Context, *host) (findings []Finding, err error) {
	if err := plugin.CheckCapabilities(); err != nil {
		return []Finding{wrong("run ebpfnetctl, and the runtime, as root with all capabilities", "%v", err)}, nil
	}
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited) // before 5.11 maps count; what fails then says so
	release := kernelRelease()
	for what, probe := range map[string]func() error{
		"bpf_redirect_peer (5.10)":  func() error { return features.HaveProgramHelper(ebpf.SchedCLS, asm.FnRedirectPeer) },
		"LRU hash maps":             func() error { return features.HaveMapType(ebpf.LRUHash) },
		"longest-prefix-match maps": func() error { return features.HaveMapType(ebpf.LPMTrie) },
		"veth devices with clsact (CONFIG_VETH, CONFIG_NET_SCH_INGRESS)": tryClsact,
	} {
		switch errProbe := probe(); {
		case errProbe == nil:
		case errors.Is(errProbe, ebpf.ErrNotSupported) || errors.Is(errProbe, unix.EOPNOTSUPP) || errors.Is(errProbe, unix.ENOENT):
			findings = append(findings, wrong("use Linux 5.10 or newer, with the modules that the distribution packs separately",
				"Linux %s lacks %s, and ADD fails", release, what))
		default:
			err = errors.Join(err, fmt.Errorf("try %s: %w", what, errProbe))
		}
	}
	if sysctl("core/bpf_jit_enable") == "0" {
		findings = append(findings, warning("sysctl -w net.core.bpf_jit_enable=1", "net.core.bpf_jit_enable is 0: the programs are interpreted, and several times slower"))
	}
	statistics, _ := os.ReadFile("/proc/net/stat/ndisc_cache") // only the first namespace has it
	limit, _ := strconv.Atoi(sysctl("ipv6/neigh/default/gc_thresh3"))
	findings = append(findings, judgeNeighbors(string(statistics), limit)...)
	if err != nil {
		return findings, err
	}
	return orGood(findings, "Linux %s has what the datapath needs", release), nil
}

// judgeNeighbors finds whether the kernel's table of IPv6 neighbors, which all namespaces share, has been full. Each line
// of its statistics has the hexadecimal figures of one CPU.
func judgeNeighbors(statistics string, limit int) []Finding {
	const enough = 16384
	lines := strings.Split(strings.TrimSpace(statistics), "\n")
	column := slices.Index(strings.Fields(lines[0]), "table_fulls")
	count := uint64(0)
	for _, line := range lines[1:] {
		if figures := strings.Fields(line); column >= 0 && column < len(figures) {
			figure, _ := strconv.ParseUint(figures[column], 16, 64)
			count += figure
		}
	}
	if count == 0 || limit >= enough {
		return nil
	}
	return []Finding{warning(fmt.Sprintf("sysctl -w net.ipv6.neigh.default.gc_thresh3=%d, and a file in /etc/sysctl.d", enough),
		"the kernel's table of IPv6 neighbors, for the host and all containers, was full %d times: it has %d places", count, limit)}
}

func kernelRelease() string {
	var name unix.Utsname
	if unix.Uname(&name) != nil {
		return "of this host"
	}
	return unix.ByteSliceToString(name.Release[:])
}

// tryClsact makes a container's devices in a namespace of its own.
func tryClsact() error {
	ns, err := newNamespace()
	if err != nil {
		return err
	}
	defer ns.Close()
	handle, err := rtnl.OpenAt(ns)
	if err != nil {
		return err
	}
	defer handle.Close()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "doctor"}, PeerName: "peer"}
	if err := handle.LinkAdd(veth); err != nil {
		return err
	}
	return handle.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: veth.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
}

func lookBPFFS(context.Context, *host) ([]Finding, error) {
	mounted, err := loader.CheckPins()
	switch {
	case errors.Is(err, loader.ErrNotSupported):
		return []Finding{wrong("find out who made it so, then run what is in brackets", "%v", err)}, nil
	case err != nil:
		return nil, err
	case !mounted:
		return []Finding{good("no BPF file system on /sys/fs/bpf yet: the first ADD mounts it")}, nil
	}
	return []Finding{good("the BPF file system is mounted, and the pins are root's alone")}, nil
}
