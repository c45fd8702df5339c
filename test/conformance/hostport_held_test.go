package conformance

import (
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestHostPortHeldByRuntime binds the host port in the plugin's parent process while the container runs, like
// podman. Clients reach the container.
func TestHostPortHeldByRuntime(t *testing.T) {
	h := newHost(t)
	for _, test := range []struct {
		name, addr string
		node       netip.Addr // where clients connect
	}{
		{"any IPv4 address", "0.0.0.0:8080", testenv.NodeAddr4},
		{"one IPv4 address", "192.0.2.1:8080", testenv.NodeAddr4},
		{"any address of both families, IPv4", "[::]:8080", testenv.NodeAddr4},
		{"any address of both families, IPv6", "[::]:8080", testenv.NodeAddr6},
		{"one IPv6 address", "[2001:db8:1::1]:8080", testenv.NodeAddr6},
	} {
		for _, protocol := range []string{"tcp", "udp"} {
			t.Run(test.name+" "+protocol, func(t *testing.T) {
				p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
					object{"hostPort": 8080, "containerPort": 80, "protocol": protocol},
				}))
				before := h.snapshot(t, p.Namespace)
				socket := bindPort(t, h.Node, protocol, netip.MustParseAddrPort(test.addr))
				defer socket.Close()
				for _, addr := range addresses(p.add(t)) {
					serve := testenv.ServeTCP
					if protocol == "udp" {
						serve = testenv.ServeUDP
					}
					serve(t, p.Namespace, netip.AddrPortFrom(addr, 80))
				}
				reply, err := testenv.Ask(testenv.Context(t), h.Outside, protocol, netip.AddrPortFrom(test.node, 8080), "hello")
				if err != nil || reply.Server != p.Name {
					t.Errorf("request to the host port: got %+v, %v; want a reply from %s", reply, err, p.Name)
				}
				p.del(t)
				h.wantUnchanged(t, before, p.Namespace)
			})
		}
	}
}

// bindPort opens a socket of this process that clients can reach. [::] serves both families, unless protocol has one.
func bindPort(t *testing.T, ns *testenv.Namespace, protocol string, addr netip.AddrPort) (socket io.Closer) {
	t.Helper()
	network := protocol
	if addr.Addr().Is4() {
		network += "4" // else 0.0.0.0 serves both as well
	}
	err := ns.Do(func() (err error) {
		var config net.ListenConfig
		config.SetMultipathTCP(true) // Go's default, which podman uses
		if strings.HasPrefix(protocol, "tcp") {
			socket, err = config.Listen(testenv.Context(t), network, addr.String())
		} else {
			socket, err = config.ListenPacket(testenv.Context(t), network, addr.String())
		}
		return err
	})
	testenv.Must(t, err)
	return socket
}
