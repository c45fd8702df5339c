package scenario

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// path is how a connection passes the node. Host port 8080 is forwarded to port 80 of the pod "web", or of the
// limited one.
type path struct {
	name           string
	client, server *testenv.Namespace
	listen, dial   netip.AddrPort // the server's own address, and the one that its client uses
}

// forwardedPath is a path through the node's FORWARD chain.
type forwardedPath struct {
	path
	clientAddr, seen netip.Addr // the client's own address, and the one that its server sees
}

// forwardedPaths returns the paths between pods and between pods and the outside.
func (n *network) forwardedPaths(f testenv.Family, a, web *testenv.Pod) []forwardedPath {
	onWeb, onOutside := at(f.Pod(web), 80), at(f.Outside, 80)
	return []forwardedPath{
		{path{"pod to pod", a.Namespace, web.Namespace, onWeb, onWeb}, f.Pod(a), f.Pod(a)},
		{path{"pod to outside", a.Namespace, n.Outside, onOutside, onOutside}, f.Pod(a), f.Node},
		{path{"outside to host port", n.Outside, web.Namespace, onWeb, at(f.Node, 8080)}, f.Outside, f.Outside},
	}
}

// forEachForwardedPath runs a subtest for each forwarded path, family and protocol.
func (n *network) forEachForwardedPath(t *testing.T, a, web *testenv.Pod, test func(t *testing.T, protocol string, p forwardedPath)) {
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		for _, p := range n.forwardedPaths(f, a, web) {
			t.Run(p.name, func(t *testing.T) { test(t, protocol, p) })
		}
	})
}

// translatedPaths returns the paths with NAT, whose connections need entries in flows.
func (n *network) translatedPaths(f testenv.Family, a, web *testenv.Pod) []path {
	onWeb, onOutside := at(f.Pod(web), 80), at(f.Outside, 80)
	return []path{
		{"pod to outside", a.Namespace, n.Outside, onOutside, onOutside},
		{"outside to host port", n.Outside, web.Namespace, onWeb, at(f.Node, 8080)},
		{"host to host port", n.node(), web.Namespace, onWeb, at(f.Loopbacks[0], 8080)},
		{"pod to host port", a.Namespace, web.Namespace, onWeb, at(f.Node, 8080)},
	}
}

// allPaths returns translatedPaths and the one between pods.
func (n *network) allPaths(f testenv.Family, a, web *testenv.Pod) []path {
	onWeb := at(f.Pod(web), 80)
	return append(n.translatedPaths(f, a, web), path{"pod to pod", a.Namespace, web.Namespace, onWeb, onWeb})
}

// routedPaths returns allPaths, and those from the outside that need a route or the host's rules, which it makes.
func (n *network) routedPaths(t *testing.T, f testenv.Family, a, web *testenv.Pod) []path {
	t.Helper()
	onWeb := at(f.Pod(web), 80)
	n.RouteTo(t, f.PodSubnet)
	paths := append(n.allPaths(f, a, web), path{"outside to pod", n.Outside, web.Namespace, onWeb, onWeb})
	if testenv.VisibleHooks.Probe() == nil { // else the host's rules are not on the fast path
		n.nodePort(t, f, web, true)
		paths = append(paths, path{"outside to node port", n.Outside, web.Namespace, onWeb, at(f.Node, nodePort)})
	}
	return paths
}

// limitedPaths returns the paths to and from a pod with a bandwidth limit; pod is another one.
func (n *network) limitedPaths(f testenv.Family, limited, pod *testenv.Pod) []path {
	outside, on, other := at(f.Outside, 7000), at(f.Pod(limited), 80), at(f.Pod(pod), 7000)
	return []path{
		{"to the outside", limited.Namespace, n.Outside, outside, outside},
		{"to a pod", limited.Namespace, pod.Namespace, other, other},
		{"to itself by its host port", limited.Namespace, limited.Namespace, on, at(f.Node, 8080)},
		{"from the outside", n.Outside, limited.Namespace, on, at(f.Node, 8080)},
		{"from a pod", pod.Namespace, limited.Namespace, on, on},
		{"from a pod by a host port", pod.Namespace, limited.Namespace, on, at(f.Node, 8080)},
		{"from the host", n.node(), limited.Namespace, on, on},
	}
}

// pair is a connection with both ends in hand, so that either can send first.
type pair struct {
	name           string
	client, server net.Conn
	sent           int
}

// silence is how long an end of a pair waits for what the other has sent, and patience how long it waits if
// another end's wait has timed out: many silent ones take no longer than one.
const silence, patience = testenv.Timeout, 100 * time.Millisecond

// openPair opens a connection and sends a packet each way. The end of the test closes it.
func openPair(t *testing.T, protocol string, p path) *pair {
	t.Helper()
	opened := &pair{name: p.name + " by " + protocol}
	if protocol == "tcp" {
		opened.client, opened.server = connectPair(t, p)
	} else {
		opened.client, opened.server = connectUDPPair(t, p)
	}
	pairs{opened}.exchange(t)
	return opened
}

// connectUDPPair is connectPair for UDP. The server's end takes packets of that client alone.
func connectUDPPair(t *testing.T, p path) (client, server net.Conn) {
	t.Helper()
	socket := listenPacket(t, p.server, p.listen)
	client, err := p.client.Dial(testenv.Context(t), "udp", p.dial)
	testenv.Must(t, err)
	t.Cleanup(func() { client.Close() })
	if _, err := client.Write([]byte("open")); err != nil {
		t.Fatal(err)
	}
	_, peer := receiveFrom(t, socket)
	return client, udpEnd{socket, peer}
}

// udpEnd is an unconnected socket that sends to one peer.
type udpEnd struct {
	*net.UDPConn
	peer netip.AddrPort
}

func (e udpEnd) Write(payload []byte) (int, error) { return e.WriteToUDPAddrPort(payload, e.peer) }

func (e udpEnd) Read(buf []byte) (int, error) {
	n, from, err := e.ReadFromUDPAddrPort(buf)
	if from = at(from.Addr().Unmap(), from.Port()); err == nil && from != e.peer {
		err = fmt.Errorf("got %q from %s, want packets of %s only", buf[:n], from, e.peer)
	}
	return n, err
}

func (e udpEnd) RemoteAddr() net.Addr { return net.UDPAddrFromAddrPort(e.peer) }

// pairs are connections that are used together.
type pairs []*pair

// fromServers sends from each server, whose packets cannot restore an entry, and wants each client to get
// exactly that.
func (all pairs) fromServers(t *testing.T) {
	t.Helper()
	all.send(t, "server to client", func(p *pair) (from, to net.Conn) { return p.server, p.client })
}

func (all pairs) fromClients(t *testing.T) {
	t.Helper()
	all.send(t, "client to server", func(p *pair) (from, to net.Conn) { return p.client, p.server })
}

// exchange sends both ways, the servers first.
func (all pairs) exchange(t *testing.T) {
	t.Helper()
	all.fromServers(t)
	all.fromClients(t)
}

func (all pairs) send(t *testing.T, direction string, ends func(*pair) (from, to net.Conn)) {
	t.Helper()
	payloads := make([]string, len(all))
	for i, p := range all {
		p.sent++
		payloads[i] = fmt.Sprintf("%08d", p.sent)
		from, _ := ends(p)
		testenv.NoError(t, from.SetWriteDeadline(time.Now().Add(silence)))
		if _, err := from.Write([]byte(payloads[i])); err != nil {
			t.Errorf("%s, %s: send: %v", p.name, direction, err)
		}
	}
	deadline := time.Now().Add(silence) // of all
	for i, p := range all {
		_, to := ends(p)
		if soon := time.Now().Add(patience); soon.After(deadline) {
			deadline = soon
		}
		if err := wantNext(to, payloads[i], deadline); err != nil {
			t.Errorf("%s, %s: %v", p.name, direction, err)
		}
	}
}

// wantNext wants this payload next.
func wantNext(conn net.Conn, payload string, deadline time.Time) error {
	if err := conn.SetReadDeadline(deadline); err != nil {
		return err
	}
	buf := make([]byte, 100)
	n, err := conn.Read(buf)
	if err != nil {
		return fmt.Errorf("receive %q: %w", payload, err)
	}
	if got := string(buf[:n]); got != payload {
		return fmt.Errorf("got %q, want %q", got, payload)
	}
	return nil
}

// readByte reads a byte, for which it waits as long as for everything.
func readByte(from net.Conn) error {
	if err := from.SetReadDeadline(time.Now().Add(testenv.Timeout)); err != nil {
		return err
	}
	_, err := from.Read(make([]byte, 1))
	return err
}

// connectPair opens a TCP connection and returns both ends, which are closed with the test.
func connectPair(t *testing.T, p path) (client, server net.Conn) {
	t.Helper()
	ctx := testenv.Context(t)
	listener, err := p.server.Listen(ctx, p.listen)
	testenv.Must(t, err)
	defer listener.Close()
	if client, err = p.client.Dial(ctx, "tcp", p.dial); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if server, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return client, server
}
