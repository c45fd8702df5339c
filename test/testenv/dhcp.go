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

// DHCPServer gives addresses of one subnet to whoever asks by any device of its
// namespace, until the end of the test.
type DHCPServer struct {
	// Subnet is what leases are from. Its first address is the router.
	Subnet netip.Prefix
	// Self is the server's own address, as it tells it.
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
	dhcpRenewal    = time.Second // so soon that a test sees it
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

// withDevices makes the kernel tell the device that a packet came by.
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

// Lease returns the address that a device has, the zero Addr for none, and how often it
// has asked for it.
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
		answer, err := s.answer(request)
		if err != nil {
			return err
		}
		if answer == nil {
			continue
		}
		back := unix.PktInfo4(&unix.Inet4Pktinfo{Ifindex: int32(device)})
		to := &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpClientPort}
		if _, _, err := s.conn.WriteMsgUDP(answer.ToBytes(), back, to); err != nil {
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
	return 0, errors.New("a packet came without its device")
}

// answer offers what it acknowledges later; other requests than these two have none.
func (s *DHCPServer) answer(request *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, error) {
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

// leaseFor returns the address of a client, a new one after all others for a new client.
func (s *DHCPServer) leaseFor(request *dhcpv4.DHCPv4) netip.Addr {
	const first = 10 // those below are for others of the subnet

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
