package conformance

import (
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestRuntimeHoldsPort reserves the host port by a socket of the process that runs the plugin,
// which stays open as long as the container lives, as podman's does: clients reach the container.
func TestRuntimeHoldsPort(t *testing.T) {
	h := newHost(t)
	for _, test := range []struct {
		name, addr string
		node       netip.Addr // what clients ask
	}{
		{"any IPv4", "0.0.0.0:8080", testenv.NodeAddr4},
		{"one IPv4", "192.0.2.1:8080", testenv.NodeAddr4},
		{"any of both, IPv4", "[::]:8080", testenv.NodeAddr4},
		{"any of both, IPv6", "[::]:8080", testenv.NodeAddr6},
		{"one IPv6", "[2001:db8:1::1]:8080", testenv.NodeAddr6},
	} {
		for _, protocol := range []string{"tcp", "udp"} {
			t.Run(test.name+" "+protocol, func(t *testing.T) {
				p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
					object{"hostPort": 8080, "containerPort": 80, "protocol": protocol},
				}))
				before := h.state(t, p.Namespace)
				socket := holdPort(t, h.Node, protocol, netip.MustParseAddrPort(test.addr))
				defer socket.Close()
				for _, addr := range addresses(p.add(t)) {
					serve := testenv.ServeTCP
					if protocol == "udp" {
						serve = testenv.ServeUDP
					}
					serve(t, p.Namespace, netip.AddrPortFrom(addr, 80))
				}
				answer, err := testenv.Ask(testenv.Context(t), h.Outside, protocol, netip.AddrPortFrom(test.node, 8080), "hello")
				if err != nil || answer.Server != p.Name {
					t.Errorf("a client asks: %+v, %v; want an answer of %s", answer, err, p.Name)
				}
				p.del(t)
				h.wantState(t, before, p.Namespace)
			})
		}
	}
}

// holdPort opens a socket of this process at which clients can ask. [::] is for both families.
func holdPort(t *testing.T, ns *testenv.Namespace, protocol string, addr netip.AddrPort) (socket io.Closer) {
	t.Helper()
	network := protocol
	if addr.Addr().Is4() {
		network += "4" // else 0.0.0.0 is for both as well
	}
	err := ns.Do(func() (err error) {
		var config net.ListenConfig
		config.SetMultipathTCP(true) // as in podman, by Go's default
		if protocol == "tcp" {
			socket, err = config.Listen(testenv.Context(t), network, addr.String())
		} else {
			socket, err = config.ListenPacket(testenv.Context(t), network, addr.String())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return socket
}
