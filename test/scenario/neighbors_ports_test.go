package scenario

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A service and its backend are asked from one address and port, at once. The backend sees both connections come
// from that address, and conntrack gives one of them another port.
func TestServiceAndBackendFromOnePort(t *testing.T) {
	const rounds = 50

	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	for _, f := range testenv.Families {
		n.nftServices(t, f, f.Pod(web))
	}
	for name, orderOf := range map[string]func(service, backend netip.AddrPort) []netip.AddrPort{
		"service first": func(service, backend netip.AddrPort) []netip.AddrPort { return []netip.AddrPort{service, backend} },
		"backend first": func(service, backend netip.AddrPort) []netip.AddrPort { return []netip.AddrPort{backend, service} },
	} {
		port := map[string]uint16{"service first": 5000, "backend first": 5001}[name]
		t.Run(name, func(t *testing.T) {
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				servers := orderOf(at(serviceAddrs[f.Name], podPort), at(f.Pod(web), 80))
				local := at(f.Pod(a), port)
				t.Run("tcp", func(t *testing.T) {
					serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
					var clients []*testenv.Client
					for _, server := range servers {
						client := connect(t, a.Namespace, "tcp", local, server)
						defer client.Close()
						askOften(t, client, web.Namespace)
						clients = append(clients, client)
					}
					for range rounds {
						for _, client := range clients {
							ask(t, client, web.Namespace)
						}
					}
				})
				t.Run("udp", func(t *testing.T) {
					serve(t, web.Namespace, "udp", at(f.Pod(web), 80))
					socket, err := a.ListenPacket(testenv.Context(t), local)
					testenv.Must(t, err)
					defer socket.Close()
					for _, server := range servers {
						for range testenv.OffloadRequests {
							askFrom(t, socket, server)
						}
					}
					for range rounds {
						for _, server := range servers {
							askFrom(t, socket, server)
						}
					}
				})
			})
		})
	}
}

// datagrams is a UDP socket without a remote.
type datagrams interface {
	WriteToUDPAddrPort([]byte, netip.AddrPort) (int, error)
	ReadFromUDPAddrPort([]byte) (int, netip.AddrPort, error)
	SetReadDeadline(time.Time) error
}

// askFrom sends a request, and wants the next datagram to come from where it was sent to.
func askFrom(t *testing.T, socket datagrams, to netip.AddrPort) {
	t.Helper()
	if _, err := socket.WriteToUDPAddrPort([]byte("1 hello\n"), to); err != nil {
		t.Fatal(err)
	}
	testenv.Must(t, socket.SetReadDeadline(time.Now().Add(testenv.Timeout)))
	_, from, err := socket.ReadFromUDPAddrPort(make([]byte, 1500))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("no reply from %s", to)
	}
	testenv.Must(t, err)
	if from = at(from.Addr().Unmap(), from.Port()); from != to {
		t.Fatalf("reply from %s, want %s", from, to)
	}
}
