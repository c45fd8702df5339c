package scenario

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// One client uses one port of its own for several connections to one port of one container: by two host ports,
// and by the container's own address.

const sharedPort = 5555

func TestSharedClientPort(t *testing.T) {
	n := newRoutedNetwork(t, podsConflist)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", twoPorts())
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		first, second, direct := at(f.Node, 8080), at(f.Node, 8081), at(f.Pod(web), 80)
		for _, tc := range []struct {
			name   string
			client *testenv.Namespace
			addr   netip.Addr
			dials  []netip.AddrPort
		}{
			{"outside", n.Outside, f.Outside, []netip.AddrPort{first, second}},
			{"outside, and directly", n.Outside, f.Outside, []netip.AddrPort{first, second, direct}},
			{"outside, directly before", n.Outside, f.Outside, []netip.AddrPort{direct, second, first}},
			{"another pod", a.Namespace, f.Pod(a), []netip.AddrPort{first, second, at(f.Gateway, 8080), direct}},
			{"the pod itself", web.Namespace, f.Pod(web), []netip.AddrPort{first, second}},
			{"node", n.node(), f.Node, []netip.AddrPort{first, second}},
			{"node, by loopback", n.node(), f.Loopbacks[0], []netip.AddrPort{at(f.Loopbacks[0], 8080), at(f.Loopbacks[0], 8081)}},
		} {
			t.Run(tc.name, func(t *testing.T) {
				serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
				var clients []*sharedClient
				for _, to := range tc.dials {
					client := dialShared(t, tc.client, protocol, at(tc.addr, sharedPort), to)
					clients = append(clients, client)
					client.ask(t) // the others are open
				}
				for range 5 {
					seen := map[string]netip.AddrPort{}
					for _, client := range slices.Backward(clients) {
						peer := client.ask(t)
						if other, known := seen[peer]; known {
							t.Fatalf("server sees connections to %s and to %s as %s", other, client.to, peer)
						}
						seen[peer] = client.to
					}
				}
			})
		}
	})
}

// sharedClient is a client of an echo server that shares its port with others.
type sharedClient struct {
	net.Conn
	to     netip.AddrPort
	number int
	seen   string
}

// dialShared connects from a port that other connections use as well.
func dialShared(t *testing.T, ns *testenv.Namespace, protocol string, local, to netip.AddrPort) *sharedClient {
	t.Helper()
	var conn net.Conn
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(local), Timeout: silence, Control: shareAddr}
	if protocol == "udp" {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(local)
	}
	err := ns.Do(func() (err error) {
		conn, err = dialer.DialContext(t.Context(), protocol, to.String())
		return err
	})
	if err != nil {
		t.Fatalf("connect from %s to %s by %s: %v", local, to, protocol, err)
	}
	client := &sharedClient{Conn: conn, to: to}
	t.Cleanup(func() { client.reset() })
	return client
}

// shareAddr lets sockets with different remotes bind one port.
func shareAddr(_, _ string, raw syscall.RawConn) (err error) {
	controlErr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(err, controlErr)
}

// reset ends the connection at once, so that the next test can use the port.
func (c *sharedClient) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Conn.Close()
}

// ask returns the client's address as the server sees it, which must not change.
func (c *sharedClient) ask(t *testing.T) (seen string) {
	t.Helper()
	c.number++
	request := fmt.Sprintf("%d to-%s", c.number, c.to)
	if _, err := fmt.Fprintln(c, request); err != nil {
		t.Fatalf("request to %s: %v", c.to, err)
	}
	if err := c.SetReadDeadline(time.Now().Add(silence)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 200)
	length, err := c.Read(buf)
	if err != nil {
		t.Fatalf("reply from %s: %v", c.to, err)
	}
	var server, number, payload string
	reply := string(buf[:length])
	if _, err := fmt.Sscan(reply, &seen, &server, &number, &payload); err != nil || number+" "+payload != request {
		t.Fatalf("reply from %s: got %q (%v), want one to %q", c.to, reply, err, request)
	}
	if c.seen != "" && seen != c.seen {
		t.Errorf("connection to %s: server sees %s, want %s as before", c.to, seen, c.seen)
	}
	c.seen = seen
	return seen
}
