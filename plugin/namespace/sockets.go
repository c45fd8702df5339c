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

// socketFiles list the sockets of the reading thread's network namespace. Netlink would need
// families that a kernel may lack.
var socketFiles = []struct {
	path     string
	protocol uint8
}{
	{"/proc/thread-self/net/tcp", unix.IPPROTO_TCP},
	{"/proc/thread-self/net/tcp6", unix.IPPROTO_TCP},
	{"/proc/thread-self/net/udp", unix.IPPROTO_UDP},
	{"/proc/thread-self/net/udp6", unix.IPPROTO_UDP},
}

// Connections returns the connections that sockets in a namespace have opened, and those that they have
// accepted, without those within the namespace.
func Connections(ns netns.NsHandle) (opened, accepted []Connection, err error) {
	var all sockets
	if err := link.InNamespace(ns, all.readFiles); err != nil {
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

// readFiles reads the files for the calling thread's namespace. Without IPv6, some are missing.
func (s *sockets) readFiles() error {
	for _, f := range socketFiles {
		file, err := os.Open(f.path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		err = s.read(file, f.protocol)
		file.Close()
		if err != nil {
			return fmt.Errorf("%s: %w", f.path, err)
		}
	}
	return nil
}

// The states of sockets in the files that matter: TCP_ESTABLISHED etc. of the kernel.
const (
	stateEstablished = 1
	stateSYNSent     = 2
	stateFINWait1    = 4
	stateFINWait2    = 5
	stateUnconnected = 7 // of UDP
	stateCloseWait   = 8
	stateListen      = 10
)

// read reads a file: a heading, and a line per socket.
func (s *sockets) read(from io.Reader, protocol uint8) error {
	lines := bufio.NewScanner(from)
	lines.Scan()
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 4 {
			return fmt.Errorf("unknown line %q", lines.Text())
		}
		local, errLocal := parseAddrPort(fields[1])
		remote, errRemote := parseAddrPort(fields[2])
		state, errState := strconv.ParseUint(fields[3], 16, 8)
		if err := errors.Join(errLocal, errRemote, errState); err != nil {
			return fmt.Errorf("unknown line %q: %w", lines.Text(), err)
		}
		s.add(Connection{protocol, local, remote}, state)
	}
	return lines.Err()
}

func (s *sockets) add(c Connection, state uint64) {
	switch state {
	case stateListen, stateUnconnected:
		if s.served == nil {
			s.served = map[servedPort]bool{}
		}
		s.served[servedPort{c.Protocol, c.Local.Port()}] = true
	case stateEstablished, stateSYNSent, stateFINWait1, stateFINWait2, stateCloseWait:
		s.connected = append(s.connected, c)
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
