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
)

// refuseListener returns an error if a process of the host has the socket that a
// host port would take the clients from. A runtime that reserves its ports by
// listening, as podman does, is no such process: it is the one that runs us.
func refuseListener(port maps.HostPort) error {
	if !socketInUse(port) {
		return nil
	}
	holder, ours := socketHolder(port)
	if ours {
		return nil
	}
	return cnitypes.NewError(CodePortTaken, fmt.Sprintf("host port %s/%s is in use on the host by %s",
		netip.AddrPortFrom(port.HostAddr, port.HostPort), port.Protocol, holder), "")
}

// socketInUse asks the kernel by trying to have the socket. With SO_REUSEADDR a
// TCP socket is refused for a listener alone, not for what is left of closed connections.
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

// socketHolder names the process that has a port's socket as well as it can be
// found, and says whether it is one that we descend from.
func socketHolder(port maps.HostPort) (name string, ours bool) {
	const unknown = "a process that cannot be found"

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

// socketInodes returns the sockets that have the port at its address or at any.
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

		// Netlink would be faster, but a kernel may lack inet_diag; nobody waits for more than an error here.
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
		return false // gone, or not ours to look at
	}
	for _, target := range targets {
		if strings.HasPrefix(target, "socket:") && inodes[target] {
			return true
		}
	}
	return false
}

// ancestorsOf returns the processes that started this one, and itself. The first
// process of all started everything, and may listen for others, as systemd does: it
// is one only where it runs us itself, as podman does that is a container's first.
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
