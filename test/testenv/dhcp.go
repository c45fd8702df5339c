package testenv

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"golang.org/x/sys/unix"
)

// DHCPServer leases addresses of one subnet to clients on all devices of its namespace, until
// the end of the test.
type DHCPServer struct {
	// Subnet provides the leases. Its first address is the router.
	Subnet netip.Prefix
	// Self is the server identifier.
	Self netip.Addr

	conn     *net.UDPConn
	mu       sync.Mutex
	leases   map[string]netip.Addr // by MAC address
	requests map[string]int
}

const (
	dhcpServerPort = 67
	dhcpClientPort = 68
	dhcpLease      = time.Minute
	dhcpRenewal    = time.Second // short enough for a test
)

// ServeDHCP starts a server in the namespace.
func ServeDHCP(tb TB, ns *Namespace, subnet netip.Prefix, self netip.Addr) *DHCPServer {
	tb.Helper()
	conn, err := ns.ListenPacket(Context(tb), netip.AddrPortFrom(netip.IPv4Unspecified(), dhcpServerPort))
	if err == nil {
		err = withDevices(conn)
	}
	if err != nil {
		tb.Fatalf("start DHCP server in %s: %v", ns.Name, err)
	}
	s := &DHCPServer{Subnet: subnet, Self: self, conn: conn, leases: map[string]netip.Addr{}, requests: map[string]int{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.serve(); err != nil {
			tb.Logf("DHCP server in %s: %v", ns.Name, err)
		}
	})
	tb.Cleanup(func() {
		conn.Close()
		wg.Wait()
	})
	return s
}

// withDevices makes the kernel report the ingress device of each packet.
func withDevices(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var sockErr error
	err = raw.Control(func(fd uintptr) {
		sockErr = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
	})
	if err != nil {
		return err
	}
	return sockErr
}

// Lease returns the address leased to a device, the zero Addr for none, and the number of its
// requests.
func (s *DHCPServer) Lease(mac net.HardwareAddr) (addr netip.Addr, requests int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leases[mac.String()], s.requests[mac.String()]
}

func (s *DHCPServer) serve() error {
	buffer, control := make([]byte, 1500), make([]byte, unix.CmsgSpace(unix.SizeofInet4Pktinfo))
	for {
		n, controlLen, _, _, err := s.conn.ReadMsgUDP(buffer, control)
		if err != nil {
			return nil // closed
		}
		device, err := deviceOf(control[:controlLen])
		if err != nil {
			return err
		}
		request, err := dhcpv4.FromBytes(buffer[:n])
		if err != nil {
			return err
		}
		reply, err := s.reply(request)
		if err != nil {
			return err
		}
		if reply == nil {
			continue
		}
		back := unix.PktInfo4(&unix.Inet4Pktinfo{Ifindex: int32(device)})
		to := &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpClientPort}
		if _, _, err := s.conn.WriteMsgUDP(reply.ToBytes(), back, to); err != nil {
			return err
		}
	}
}

func deviceOf(control []byte) (int, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return 0, err
	}
	for _, message := range messages {
		if message.Header.Level == unix.IPPROTO_IP && message.Header.Type == unix.IP_PKTINFO && len(message.Data) >= 4 {
			return int(binary.NativeEndian.Uint32(message.Data)), nil
		}
	}
	return 0, errors.New("no device for a packet")
}

// reply returns an offer or an acknowledgement, and nil for other requests.
func (s *DHCPServer) reply(request *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, error) {
	kinds := map[dhcpv4.MessageType]dhcpv4.MessageType{
		dhcpv4.MessageTypeDiscover: dhcpv4.MessageTypeOffer,
		dhcpv4.MessageTypeRequest:  dhcpv4.MessageTypeAck,
	}
	kind, known := kinds[request.MessageType()]
	if !known {
		return nil, nil
	}
	return dhcpv4.NewReplyFromRequest(request,
		dhcpv4.WithMessageType(kind),
		dhcpv4.WithYourIP(s.leaseFor(request).AsSlice()),
		dhcpv4.WithOption(dhcpv4.OptServerIdentifier(s.Self.AsSlice())),
		dhcpv4.WithNetmask(net.CIDRMask(s.Subnet.Bits(), 32)),
		dhcpv4.WithRouter(s.Subnet.Addr().Next().AsSlice()),
		dhcpv4.WithLeaseTime(uint32(dhcpLease.Seconds())),
		dhcpv4.WithOption(dhcpv4.OptRenewTimeValue(dhcpRenewal)),
	)
}

// leaseFor returns a client's address. A new client gets the next free one.
func (s *DHCPServer) leaseFor(request *dhcpv4.DHCPv4) netip.Addr {
	const first = 10 // lower addresses are not leased

	s.mu.Lock()
	defer s.mu.Unlock()
	mac := request.ClientHWAddr.String()
	if request.MessageType() == dhcpv4.MessageTypeRequest {
		s.requests[mac]++
	}
	if _, known := s.leases[mac]; !known {
		addr := s.Subnet.Addr()
		for range first + len(s.leases) {
			addr = addr.Next()
		}
		s.leases[mac] = addr
	}
	return s.leases[mac]
}
