package plugin

import (
	"errors"
	"fmt"
	iofs "io/fs"
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
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
	table, errTCP := readSockets(fs)
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

// socketTable has the sockets of the host.
type socketTable map[protocolPort][]socket

type protocolPort struct {
	protocol maps.Protocol
	port     uint64
}

// readSockets reads the sockets of this network namespace. Where errTCP is not nil, some of TCP may be missing. Netlink
// would be faster, but a kernel may lack inet_diag, and only a port in use waits for this.
func readSockets(fs procfs.FS) (table socketTable, errTCP error) {
	const listening = 10

	table = socketTable{}
	//lint:ignore SA1019 see above
	tcp4, errTCP := fs.NetTCP()
	//lint:ignore SA1019 see above
	tcp6, err := fs.NetTCP6()
	if !errors.Is(err, iofs.ErrNotExist) { // a kernel without IPv6
		errTCP = errors.Join(errTCP, err)
	}
	for _, line := range append(tcp4, tcp6...) {
		if line.St == listening {
			table.add(protocolPort{maps.TCP, line.LocalPort}, line.LocalAddr, line.Inode)
		}
	}
	udp4, _ := fs.NetUDP()
	udp6, _ := fs.NetUDP6()
	for _, line := range append(udp4, udp6...) {
		table.add(protocolPort{maps.UDP, line.LocalPort}, line.LocalAddr, line.Inode)
	}
	return table, errTCP
}

func (t socketTable) add(port protocolPort, local []byte, inode uint64) {
	addr, _ := netip.AddrFromSlice(local)
	t[port] = append(t[port], socket{addr: addr.Unmap(), name: fmt.Sprintf("socket:[%d]", inode)})
}

// at returns the sockets whose clients a host port would take over. A socket of [::] may serve both
// families, but only IPv6 if another socket has the port's IPv4 address.
func (t socketTable) at(port maps.HostPort) (found []socket) {
	sockets := t[protocolPort{port.Protocol, uint64(port.HostPort)}]
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
