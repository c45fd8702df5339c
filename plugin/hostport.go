package plugin

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
)

// checkListeners returns an error if a process of the host has a socket whose clients a host port
// of the container would take over. A runtime that reserves the port by listening is no conflict.
func checkListeners(ports []maps.HostPort, containerID string) error {
	ports = slices.DeleteFunc(slices.Clone(ports), func(port maps.HostPort) bool { return !isInUse(port) })
	if len(ports) == 0 {
		return nil
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return err
	}
	table, errTCP := readSockets()
	ports = slices.DeleteFunc(ports, func(port maps.HostPort) bool { // only connections of the host, open or past
		return port.Protocol == maps.TCP && errTCP == nil && len(table.at(port)) == 0
	})
	var all []socket
	for _, port := range ports {
		all = append(all, table.at(port)...)
	}
	holders := findHolders(fs, all, containerID)
	for _, port := range ports {
		if holder, isTaken := holders.of(table.at(port)); isTaken {
			return cnitypes.NewError(cnierr.CodePortTaken, fmt.Sprintf("host port %s/%s is in use on the host by %s",
				netip.AddrPortFrom(port.HostAddr, port.HostPort), port.Protocol, holder), "")
		}
	}
	return nil
}

// isInUse tries to bind the port. With SO_REUSEADDR for TCP, a listener makes that fail, and so does a connection
// with a port that the kernel chose, until some time after its end. Old connections of a listener do not.
func isInUse(port maps.HostPort) bool {
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

// socket is a socket of the host that listens, or one of UDP.
type socket struct {
	addr netip.Addr
	name string // its name among a process's files
}

type socketTable map[protocolPort][]socket

type protocolPort struct {
	protocol maps.Protocol
	port     uint16
}

// readSockets reads the sockets of this network namespace. Where errTCP is not nil, some of TCP may be missing.
func readSockets() (table socketTable, errTCP error) {
	table = socketTable{}
	tcp, errTCP := namespace.Sockets(unix.IPPROTO_TCP)
	udp, _ := namespace.Sockets(unix.IPPROTO_UDP)
	for _, s := range append(tcp, udp...) {
		protocol := maps.Protocol(s.Protocol)
		if protocol == maps.UDP || s.State == namespace.StateListen {
			port := protocolPort{protocol, s.Local.Port()}
			table[port] = append(table[port], socket{s.Local.Addr(), fmt.Sprintf("socket:[%d]", s.Inode)})
		}
	}
	return table, errTCP
}

// at returns the sockets whose clients a host port would take over. A socket of [::] may serve both
// families, but only IPv6 if another socket has the port's IPv4 address.
func (t socketTable) at(port maps.HostPort) (found []socket) {
	sockets := t[protocolPort{port.Protocol, port.HostPort}]
	for _, s := range sockets {
		sameAddr := s.addr == port.HostAddr || s.addr.IsUnspecified() || port.HostAddr.IsUnspecified()
		if s.addr.Is4() == port.HostAddr.Is4() && sameAddr {
			found = append(found, s)
		}
	}
	if len(found) > 0 || port.HostAddr.Is6() {
		return found
	}
	return slices.DeleteFunc(slices.Clone(sockets), func(s socket) bool { return s.addr != netip.IPv6Unspecified() })
}

// holders maps a socket's name to the name of the process that has it, or to "" if that process
// reserves the port for the container.
type holders map[string]string

// unknownHolder stands for a process that is not visible here, or that has ended.
const unknownHolder = "an unknown process"

// of returns the name of the first process that has one of the sockets for itself.
func (h holders) of(sockets []socket) (name string, found bool) {
	if len(sockets) == 0 {
		return unknownHolder, true
	}
	for _, socket := range sockets {
		if name := h[socket.name]; name != "" {
			return name, true
		}
	}
	return "", false
}

// findHolders looks for sockets among the files of all processes.
func findHolders(fs procfs.FS, sockets []socket, containerID string) holders {
	found := holders{}
	for _, socket := range sockets {
		found[socket.name] = unknownHolder
	}
	processes, err := fs.AllProcs()
	if err != nil {
		return found
	}
	ancestors := ancestorsOf(fs, os.Getpid())
	for _, process := range processes {
		held := found.heldBy(process)
		if len(held) == 0 {
			continue
		}
		name := ""
		if !ancestors[process.PID] && !isConmon(fs, process, containerID) {
			comm, _ := process.Comm()
			name = fmt.Sprintf("%s (pid %d)", comm, process.PID)
		}
		for _, socket := range held {
			found[socket] = name
		}
	}
	return found
}

// heldBy returns the sockets that a process has, without those that are known to reserve a port: a
// runtime's children may have them, too.
func (h holders) heldBy(process procfs.Proc) []string {
	targets, err := process.FileDescriptorTargets()
	if err != nil {
		return nil // gone, or no permission
	}
	return slices.DeleteFunc(targets, func(target string) bool { return h[target] == "" })
}

// ancestorsOf returns a process and its ancestors: podman reserves a new container's ports by
// listening. Process 1 is every process's ancestor and may listen for others, as systemd does: it
// counts only as the direct parent, as with a podman that is a container's process 1.
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

// isConmon reports whether a process is the container's conmon, to which podman passes the reserved
// ports. conmon outlives podman, so it is not an ancestor. Any process can have its name and
// arguments, so the process must run as root, from a file of root, outside of containers.
func isConmon(fs procfs.FS, process procfs.Proc, containerID string) bool {
	args, err := process.CmdLine()
	option := slices.Index(args, "-c")
	if err != nil || option < 0 || !slices.Equal(args[option+1:min(option+2, len(args))], []string{containerID}) {
		return false
	}
	status, err := process.NewStatus()
	if err != nil || status.UIDs != [4]uint64{} {
		return false
	}
	return hasRootsExecutable(process, "conmon") && isOnHost(fs, process)
}

// hasRootsExecutable reports whether a process runs a file of this name that only root can write.
// An upgrade may have deleted the file.
func hasRootsExecutable(process procfs.Proc, name string) bool {
	path, err := process.Executable()
	if err != nil || filepath.Base(strings.TrimSuffix(path, " (deleted)")) != name {
		return false
	}
	info, err := os.Stat(filepath.Join(procfs.DefaultMountPoint, fmt.Sprint(process.PID), "exe"))
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o022 == 0 && info.Sys().(*syscall.Stat_t).Uid == 0
}

// isOnHost reports whether a process has the user, mount and PID namespaces of this process or of
// process 1.
func isOnHost(fs procfs.FS, process procfs.Proc) bool {
	its, err := process.Namespaces()
	if err != nil {
		return false
	}
	for _, pid := range []int{os.Getpid(), 1} {
		host, err := fs.Proc(pid)
		if err != nil {
			continue
		}
		ours, err := host.Namespaces()
		if err == nil && its["user"] == ours["user"] && its["mnt"] == ours["mnt"] && its["pid"] == ours["pid"] {
			return true
		}
	}
	return false
}
