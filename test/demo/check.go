package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// oldestKernel is the first one with all that the datapath needs.
var oldestKernel = testenv.Version{Major: 5, Minor: 10}

// check says what is missing here to run the demo, all at once and each with what
// to do about it.
func check(opts options) []string {
	var missing []string
	add := func(err error) {
		if err != nil {
			missing = append(missing, err.Error())
		}
	}
	add(checkKernel())
	add(checkIPv6())
	add(checkFiles(opts))
	if err := checkRoot(); err != nil {
		return append(missing, err.Error()) // what follows would only say so again
	}
	add(checkBPF())
	add(checkNamespaces())
	return missing
}

func checkKernel() error {
	version, err := testenv.KernelVersion()
	if err == nil && version.Less(oldestKernel) {
		err = fmt.Errorf("this kernel is Linux %s: ebpfnet needs %s or newer", kernelRelease(), oldestKernel)
	}
	return err
}

func kernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return "of unknown version"
	}
	return unix.ByteSliceToString(name.Release[:])
}

func checkIPv6() error {
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		return errors.New("this kernel runs without IPv6 (ipv6.disable=1 on its command line?), which half of the demo is about")
	}
	return nil
}

// checkFiles finds out early what would be hidden or missing inside.
func checkFiles(opts options) error {
	path, pathErr := conflistPath(opts)
	if pathErr == nil {
		_, pathErr = readConflist(path)
	}
	dir, dirErr := pluginDir()
	for _, place := range []string{path, dir} {
		for _, private := range []string{"/run/", "/var/run/", "/sys/", "/proc/", "/var/lib/cni/", "/var/lib/ebpfnet/"} {
			if strings.HasPrefix(place, private) {
				return fmt.Errorf("%s is below %s, which the demo replaces by one of its own: copy it elsewhere", place, private)
			}
		}
	}
	return errors.Join(pathErr, dirErr)
}

// checkRoot also finds a root that has been stripped of its power, as in a container.
func checkRoot() error {
	if uid := os.Geteuid(); uid != 0 {
		return fmt.Errorf("this is user %d: namespaces and BPF need root: run `sudo make demo`", uid)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of this process: %w", err)
	}
	var lacking []string
	// CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON, on kernels that have them.
	for number, name := range map[int]string{
		unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN", unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_NET_RAW: "CAP_NET_RAW",
	} {
		if data[number/32].Effective&(1<<(number%32)) == 0 {
			lacking = append(lacking, name)
		}
	}
	if len(lacking) > 0 {
		return fmt.Errorf("this root lacks %s: in a container, start it with --privileged", strings.Join(lacking, " and "))
	}
	return nil
}

// checkBPF makes a small map and a small program of the datapath's type.
func checkBPF() error {
	why := func(what string, err error) error {
		hint := "is the kernel built with CONFIG_BPF_SYSCALL and CONFIG_NET_CLS_ACT?"
		if errors.Is(err, os.ErrPermission) {
			hint = "a seccomp filter, a security module, a user namespace or lockdown forbids it"
		}
		return fmt.Errorf("the kernel refuses a BPF %s: %w: %s", what, err, hint)
	}
	_ = rlimit.RemoveMemlock() // where it matters and fails, the map does
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		return why("map", err)
	}
	defer m.Close()

	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type:         ebpf.SchedCLS,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
		License:      "GPL",
	})
	if err != nil {
		return why("program", err)
	}
	return program.Close()
}

// checkNamespaces tries, on a thread that is thrown away with them, the namespaces
// that the demo will live in, and a veth pair.
func checkNamespaces() error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		result <- func() error {
			for _, kind := range []struct {
				flag int
				name string
			}{{unix.CLONE_NEWNS, "mount"}, {unix.CLONE_NEWPID, "PID"}, {unix.CLONE_NEWNET, "network"}} {
				if err := unix.Unshare(kind.flag); err != nil {
					return fmt.Errorf("the kernel refuses a new %s namespace: %w: a seccomp filter or a limit below /proc/sys/user forbids it",
						kind.name, err)
				}
			}
			handle, err := rtnl.Open()
			if err != nil {
				return fmt.Errorf("open netlink: %w", err)
			}
			defer handle.Close()
			if err := handle.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a", TxQLen: -1}, PeerName: "b"}); err != nil {
				return fmt.Errorf("the kernel refuses a veth pair: %w: is it built with CONFIG_VETH?", err)
			}
			return nil
		}()
	}()
	return <-result
}
