package scenario

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The verbs of the stories. Each fails the test where it is not true.

// at is an address and port.
func at(addr netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(addr, port) }

// serve starts a server for [reach] and returns where it listens. Port 0 takes any.
func serve(t *testing.T, ns *testenv.Namespace, protocol string, addr netip.AddrPort) netip.AddrPort {
	t.Helper()
	if protocol == "udp" {
		return testenv.ServeUDP(t, ns, addr).Addr
	}
	return testenv.ServeTCP(t, ns, addr).Addr
}

// reach asks a server by a new socket. It fails unless the server of the namespace want
// answers. It returns the client's own address, and the client's as the server sees it.
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
		t.Fatalf("%s connects to %s by %s: %v", from.Name, to, protocol, err)
	}
	return client
}

// ask asks over a client's socket, and returns the client's address as the server sees it.
func ask(t *testing.T, client *testenv.Client, want *testenv.Namespace) (seen netip.AddrPort) {
	t.Helper()
	answer, err := client.Ask(testenv.Context(t), "hello")
	if err != nil {
		t.Fatalf("%s asks: %v", client.Local(), err)
	}
	if answer.Server != want.Name {
		t.Fatalf("%s asks: %s answers, want %s", client.Local(), answer.Server, want.Name)
	}
	return answer.Peer
}

// reachAsOneself is reach where nobody on the way may translate the client's address.
func reachAsOneself(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace) {
	t.Helper()
	own, seen := reach(t, from, protocol, to, want)
	if seen != own {
		t.Errorf("%s asks %s by %s: the server sees %s, want the client's own address %s", from.Name, to, protocol, seen, own)
	}
}

// reachAsGateway is reach where the server must see the gateway: what clients on the node,
// to whom the pod cannot answer, are given as their address.
func reachAsGateway(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace, f family) {
	t.Helper()
	if _, seen := reach(t, from, protocol, to, want); seen.Addr() != f.gateway {
		t.Errorf("%s asks %s by %s: the server sees %s, want the gateway %s", from.Name, to, protocol, seen, f.gateway)
	}
}

// isRefused asks where nobody listens: the answer must be a reset, or an ICMP error,
// and not silence.
func isRefused(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort) {
	t.Helper()
	answer, err := testenv.Ask(testenv.Context(t), from, protocol, to, "hello")
	if err == nil {
		t.Fatalf("%s asks %s by %s: %s answers, want a refusal", from.Name, to, protocol, answer.Server)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("%s asks %s by %s: %v, want a refusal", from.Name, to, protocol, err)
	}
}

func ping(t *testing.T, from *testenv.Namespace, to netip.Addr) {
	t.Helper()
	if err := testenv.Ping(testenv.Context(t), from, to); err != nil {
		t.Errorf("%s pings %s: %v", from.Name, to, err)
	}
}

func del(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	if err := pod.Del(testenv.Context(t)); err != nil {
		t.Fatalf("detach %s: %v", pod.Name, err)
	}
}
