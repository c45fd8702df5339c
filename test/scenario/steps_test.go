package scenario

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Steps that most tests share. Each fails the test unless it succeeds.

// at returns an address and port.
func at(addr netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(addr, port) }

// serve starts a server for [reach] and returns its address. Port 0 takes any.
func serve(t *testing.T, ns *testenv.Namespace, protocol string, addr netip.AddrPort) netip.AddrPort {
	t.Helper()
	if protocol == "udp" {
		return testenv.ServeUDP(t, ns, addr).Addr
	}
	return testenv.ServeTCP(t, ns, addr).Addr
}

// reach sends a request over a new socket, and wants the reply from the server in want. It returns the
// client's own address, and the client's address as the server sees it.
func reach(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace) (own, seen netip.AddrPort) {
	t.Helper()
	client := connect(t, from, protocol, netip.AddrPort{}, to)
	defer client.Close()
	return client.Local(), ask(t, client, want)
}

// connect opens a client's socket. The zero local lets the kernel choose.
func connect(t *testing.T, from *testenv.Namespace, protocol string, local, to netip.AddrPort) *testenv.Client {
	t.Helper()
	client, err := testenv.NewClient(testenv.Context(t), from, protocol, local, to)
	if err != nil {
		t.Fatalf("connect from %s to %s by %s: %v", from.Name, to, protocol, err)
	}
	return client
}

// ask sends a request over a client's socket, wants the reply from the server in want, and returns
// the client's address as the server sees it.
func ask(t *testing.T, client *testenv.Client, want *testenv.Namespace) (seen netip.AddrPort) {
	t.Helper()
	reply, err := client.Ask(testenv.Context(t), "hello")
	if err != nil {
		t.Fatalf("request from %s: %v", client.Local(), err)
	}
	if reply.Server != want.Name {
		t.Fatalf("request from %s: reply from %s, want %s", client.Local(), reply.Server, want.Name)
	}
	return reply.Peer
}

// askOften sends as many requests as offload a connection, where its network does that.
func askOften(t *testing.T, client *testenv.Client, want *testenv.Namespace) {
	t.Helper()
	for range testenv.OffloadRequests {
		ask(t, client, want)
	}
}

// reachUntranslated is reach where the server must see the client's own address.
func reachUntranslated(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace) {
	t.Helper()
	own, seen := reach(t, from, protocol, to, want)
	if seen != own {
		t.Errorf("%s to %s by %s: server sees %s, want the client's own address %s", from.Name, to, protocol, seen, own)
	}
}

// reachAsGateway is reach where the server must see the gateway's address, which replaces that of
// a client on the node.
func reachAsGateway(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace, f testenv.Family) {
	t.Helper()
	if _, seen := reach(t, from, protocol, to, want); seen.Addr() != f.Gateway {
		t.Errorf("%s to %s by %s: server sees %s, want the gateway %s", from.Name, to, protocol, seen, f.Gateway)
	}
}

// reachAsNode is reach where the server must see an address of the node.
func reachAsNode(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace, node netip.Addr) {
	t.Helper()
	if _, seen := reach(t, from, protocol, to, want); seen.Addr() != node {
		t.Errorf("%s to %s by %s: server sees %s, want the node %s", from.Name, to, protocol, seen, node)
	}
}

// reachInAndOut sends requests both ways through the uplink, with the pod behind host port 8080.
func (n *network) reachInAndOut(t *testing.T, f testenv.Family, protocol string, pod *testenv.Pod, outside netip.AddrPort) {
	t.Helper()
	reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), pod.Namespace)
	reachAsNode(t, pod.Namespace, protocol, outside, n.Outside, f.Node)
}

// wantRefused sends a request to a closed port. The response must be a reset or an ICMP error, not
// silence.
func wantRefused(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort) {
	t.Helper()
	reply, err := testenv.Ask(testenv.Context(t), from, protocol, to, "hello")
	if err == nil {
		t.Fatalf("%s to %s by %s: reply from %s, want a refusal", from.Name, to, protocol, reply.Server)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("%s to %s by %s: %v, want a refusal", from.Name, to, protocol, err)
	}
}

func ping(t *testing.T, from *testenv.Namespace, to netip.Addr) {
	t.Helper()
	if err := testenv.Ping(testenv.Context(t), from, to); err != nil {
		t.Errorf("ping %s from %s: %v", to, from.Name, err)
	}
}

// wantCheck wants CHECK of the pods to succeed.
func wantCheck(t *testing.T, pods ...*testenv.Pod) {
	t.Helper()
	for _, pod := range pods {
		if err := pod.Check(testenv.Context(t)); err != nil {
			t.Errorf("CHECK %s: %v", pod.Name, err)
		}
	}
}

func del(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	if err := pod.Del(testenv.Context(t)); err != nil {
		t.Fatalf("detach %s: %v", pod.Name, err)
	}
}

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
	testenv.Must(t, socket.SetReadDeadline(time.Now().Add(testenv.Timeout)))
	buf := make([]byte, 1<<16)
	length, from, err := socket.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatalf("receive at %s: %v", socket.LocalAddr(), err)
	}
	return string(buf[:length]), at(from.Addr().Unmap(), from.Port())
}
