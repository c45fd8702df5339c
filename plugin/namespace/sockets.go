package namespace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Connection is a TCP connection or a connected UDP socket, from the side of the container.
type Connection struct {
	Protocol      uint8
	Local, Remote netip.AddrPort
}

// Socket is a line of the kernel's lists of sockets.
type Socket struct {
	Connection
	State uint8
	Inode uint64 // 0 after its end
}

// Sockets returns the sockets of a protocol, TCP or UDP, in the calling thread's namespace. After an error, some are
// missing. Netlink would be faster, but needs families that a kernel may lack.
func Sockets(protocol uint8) ([]Socket, error) {
	path := "/proc/thread-self/net/tcp"
	if protocol == unix.IPPROTO_UDP {
		path = "/proc/thread-self/net/udp"
	}
	found, errIPv4 := readFile(path, protocol)
	found6, errIPv6 := readFile(path+"6", protocol)
	if errors.Is(errIPv6, fs.ErrNotExist) { // a kernel without IPv6
		errIPv6 = nil
	}
	return append(found, found6...), errors.Join(errIPv4, errIPv6)
}

func readFile(path string, protocol uint8) ([]Socket, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	found, err := read(file, protocol)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return found, nil
}

// Connections returns the connections that sockets in a namespace have opened, and those that they have
// accepted, without those within the namespace.
func Connections(ns netns.NsHandle) (opened, accepted []Connection, err error) {
	var all sockets
	err = link.InNamespace(ns, func() error {
		for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			found, err := Sockets(protocol)
			if err != nil {
				return err
			}
			all.add(found)
		}
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("read the sockets of a network namespace: %w", err)
	}
	opened, accepted = all.split()
	return opened, accepted, nil
}

// servedPort is a port with a listener.
type servedPort struct {
	protocol uint8
	port     uint16
}

// sockets are those of a namespace.
type sockets struct {
	connected []Connection
	served    map[servedPort]bool
}

// split tells the connections whose local port has no listener, on any address, from the others.
func (s *sockets) split() (opened, accepted []Connection) {
	for _, c := range s.connected {
		local, remote := c.Local.Addr(), c.Remote.Addr()
		switch {
		case local == remote || local.IsLoopback():
		case s.served[servedPort{c.Protocol, c.Local.Port()}]:
			accepted = append(accepted, c)
		default:
			opened = append(opened, c)
		}
	}
	return opened, accepted
}

// The states of sockets in the files that matter: TCP_ESTABLISHED etc. of the kernel.
const (
	stateEstablished = 1
	stateSYNSent     = 2
	stateFINWait1    = 4
	stateFINWait2    = 5
	stateUnconnected = 7 // of UDP
	stateCloseWait   = 8
	// StateListen is the state of a TCP socket that listens.
	StateListen = 10
)

// read reads a file: a heading, and a line per socket. A line has 10 fields or more: a number, the two ends, the state,
// five others, and the inode.
func read(from io.Reader, protocol uint8) (found []Socket, err error) {
	lines := bufio.NewScanner(from)
	lines.Scan()
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 {
			return nil, fmt.Errorf("unknown line %q", lines.Text())
		}
		local, errLocal := parseAddrPort(fields[1])
		remote, errRemote := parseAddrPort(fields[2])
		state, errState := strconv.ParseUint(fields[3], 16, 8)
		inode, errInode := strconv.ParseUint(fields[9], 10, 64)
		if err := errors.Join(errLocal, errRemote, errState, errInode); err != nil {
			return nil, fmt.Errorf("unknown line %q: %w", lines.Text(), err)
		}
		found = append(found, Socket{Connection{protocol, local, remote}, uint8(state), inode})
	}
	return found, lines.Err()
}

func (s *sockets) add(found []Socket) {
	for _, socket := range found {
		switch socket.State {
		case StateListen, stateUnconnected:
			if s.served == nil {
				s.served = map[servedPort]bool{}
			}
			s.served[servedPort{socket.Protocol, socket.Local.Port()}] = true
		case stateEstablished, stateSYNSent, stateFINWait1, stateFINWait2, stateCloseWait:
			s.connected = append(s.connected, socket.Connection)
		}
	}
}

// parseAddrPort parses an address as these files have it: 32-bit words, which have network byte order
// in memory, printed as numbers of this machine, and the port as a number.
func parseAddrPort(text string) (netip.AddrPort, error) {
	words, portText, _ := strings.Cut(text, ":")
	port, err := strconv.ParseUint(portText, 16, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var bytes []byte
	for ; len(words) >= 8; words = words[8:] {
		word, err := strconv.ParseUint(words[:8], 16, 32)
		if err != nil {
			return netip.AddrPort{}, err
		}
		bytes = binary.NativeEndian.AppendUint32(bytes, uint32(word))
	}
	addr, ok := netip.AddrFromSlice(bytes)
	if !ok || words != "" {
		return netip.AddrPort{}, fmt.Errorf("%q is not an address", text)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(port)), nil
}
