package plugin

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// checkListeners returns an error if a process of the host has a socket whose clients the host port
// would take over. A runtime that reserves its ports by listening, as podman does, is an exception:
// it is an ancestor of this process.
func checkListeners(port maps.HostPort) error {
	if !socketInUse(port) {
		return nil
	}
	holder, isAncestor := socketHolder(port)
	if isAncestor {
		return nil
	}
	return cnitypes.NewError(cnierr.CodePortTaken, fmt.Sprintf("host port %s/%s is in use on the host by %s",
		netip.AddrPortFrom(port.HostAddr, port.HostPort), port.Protocol, holder), "")
}

// socketInUse tries to bind the socket. With SO_REUSEADDR only a listener makes that fail for TCP,
// not the remains of closed connections.
func socketInUse(port maps.HostPort) bool {
	family, kind := unix.AF_INET6, unix.SOCK_DGRAM
	var address unix.Sockaddr = &unix.SockaddrInet6{Port: int(port.HostPort), Addr: port.HostAddr.As16()}
	if port.HostAddr.Is4() {
		family = unix.AF_INET
		address = &unix.SockaddrInet4{Port: int(port.HostPort), Addr: port.HostAddr.As4()}
	}
	if port.Protocol == maps.TCP {
		kind = unix.SOCK_STREAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)

	if port.Protocol == maps.TCP {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if family == unix.AF_INET6 {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	return errors.Is(unix.Bind(fd, address), unix.EADDRINUSE)
}

// socketHolder names the process that has a port's socket, as far as it can be found. isAncestor is
// true if that process is an ancestor of this one.
func socketHolder(port maps.HostPort) (name string, isAncestor bool) {
	const unknown = "an unknown process"

	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return unknown, false
	}
	inodes := socketInodes(fs, port)
	processes, err := fs.AllProcs()
	if err != nil {
		return unknown, false
	}
	ancestors := ancestorsOf(fs, os.Getpid())
	name = unknown
	for _, process := range processes {
		if !hasSocket(process, inodes) {
			continue
		}
		if ancestors[process.PID] {
			return "", true
		}
		if comm, err := process.Comm(); err == nil {
			name = fmt.Sprintf("%s (pid %d)", comm, process.PID)
		}
	}
	return name, false
}

// socketInodes returns the sockets that are bound to the port at its address or at any.
func socketInodes(fs procfs.FS, port maps.HostPort) map[string]bool {
	inodes := map[string]bool{}
	add := func(addr []byte, localPort, inode uint64) {
		bound, _ := netip.AddrFromSlice(addr)
		bound = bound.Unmap()
		if localPort == uint64(port.HostPort) && (bound.IsUnspecified() || port.HostAddr.IsUnspecified() || bound == port.HostAddr) {
			inodes[fmt.Sprintf("socket:[%d]", inode)] = true
		}
	}
	if port.Protocol == maps.TCP {
		const listening = 10

		// Netlink would be faster, but a kernel may lack inet_diag, and only an error waits for this.
		//lint:ignore SA1019 see above
		tcp4, _ := fs.NetTCP()
		//lint:ignore SA1019 see above
		tcp6, _ := fs.NetTCP6()
		for _, line := range append(tcp4, tcp6...) {
			if line.St == listening {
				add(line.LocalAddr, line.LocalPort, line.Inode)
			}
		}
		return inodes
	}
	udp4, _ := fs.NetUDP()
	udp6, _ := fs.NetUDP6()
	for _, line := range append(udp4, udp6...) {
		add(line.LocalAddr, line.LocalPort, line.Inode)
	}
	return inodes
}

func hasSocket(process procfs.Proc, inodes map[string]bool) bool {
	targets, err := process.FileDescriptorTargets()
	if err != nil {
		return false // gone, or no permission
	}
	for _, target := range targets {
		if strings.HasPrefix(target, "socket:") && inodes[target] {
			return true
		}
	}
	return false
}

// ancestorsOf returns a process and its ancestors. Process 1 is every process's ancestor and may
// listen for others, as systemd does: it counts only as the direct parent, as with a podman that is
// a container's process 1.
func ancestorsOf(fs procfs.FS, pid int) map[int]bool {
	ancestors := map[int]bool{os.Getppid(): true}
	for pid > 1 {
		ancestors[pid] = true
		process, err := fs.Proc(pid)
		if err != nil {
			break
		}
		stat, err := process.Stat()
		if err != nil {
			break
		}
		pid = stat.PPID
	}
	return ancestors
}
