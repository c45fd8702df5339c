package scenario

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Unconnected UDP sockets, for what [testenv.Client] cannot do.

// listenPacket opens a socket. The end of the test closes it. Port 0 takes any.
func listenPacket(t *testing.T, ns *testenv.Namespace, addr netip.AddrPort) *net.UDPConn {
	t.Helper()
	socket, err := ns.ListenPacket(testenv.Context(t), addr)
	if err != nil {
		t.Fatalf("open socket in %s: %v", ns.Name, err)
	}
	t.Cleanup(func() { socket.Close() })
	return socket
}

func sendTo(t *testing.T, socket *net.UDPConn, to netip.AddrPort, payload string) {
	t.Helper()
	if _, err := socket.WriteToUDPAddrPort([]byte(payload), to); err != nil {
		t.Fatalf("send %d bytes to %s: %v", len(payload), to, err)
	}
}

func receiveFrom(t *testing.T, socket *net.UDPConn) (payload string, from netip.AddrPort) {
	t.Helper()
	if err := socket.SetReadDeadline(time.Now().Add(testenv.Timeout)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	length, from, err := socket.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatalf("receive at %s: %v", socket.LocalAddr(), err)
	}
	return string(buf[:length]), at(from.Addr().Unmap(), from.Port())
}
