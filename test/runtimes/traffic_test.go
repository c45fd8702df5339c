package runtimes

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Commands of busybox in a container. Their port is 8080 of the node.
var (
	echoServer = []string{"nc", "-ll", "-p", "80", "-e", "/bin/busybox", "cat"}
	webServer  = []string{"httpd", "-f", "-p", "80", "-h", "/www"}
)

// wantPublished wants a container's web server at port 8080 of the node's addresses, from everywhere.
func (m *machine) wantPublished(t *testing.T) {
	t.Helper()
	m.wantPublishedAt(t, testenv.NodeAddr4, testenv.NodeAddr6)
}

func (m *machine) wantPublishedAt(t *testing.T, addrs ...netip.Addr) {
	t.Helper()
	for _, client := range []*testenv.Namespace{m.Node, m.Outside} {
		for _, addr := range addrs {
			url := fmt.Sprintf("http://%s/", netip.AddrPortFrom(addr, 8080))
			testenv.Eventually(t, "the web server", func() error {
				body, err := testenv.HTTPGet(testenv.Context(t), client, url)
				if err == nil && body != "hello" {
					err = fmt.Errorf("get %s from %s: got %q, want hello", url, client.Name, body)
				}
				return err
			})
		}
	}
}

// connection is an open connection to an echo server.
type connection struct {
	net.Conn
	reader *bufio.Reader
}

// connect opens a connection to the container's server.
func (m *machine) connect(t *testing.T, client *testenv.Namespace, addr string) *connection {
	t.Helper()
	c := &connection{}
	testenv.Eventually(t, "the echo server", func() (err error) {
		if c.Conn, err = client.Dial(testenv.Context(t), "tcp", netip.AddrPortFrom(netip.MustParseAddr(addr), 8080)); err != nil {
			return err
		}
		c.reader = bufio.NewReader(c.Conn)
		if err = c.ask(); err != nil {
			c.Close()
		}
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// ask wants an answer over the same connection.
func (c *connection) ask() error {
	c.SetDeadline(time.Now().Add(testenv.Timeout))
	if _, err := fmt.Fprintln(c, "still there?"); err != nil {
		return err
	}
	answer, err := c.reader.ReadString('\n')
	if err == nil && answer != "still there?\n" {
		err = fmt.Errorf("got %q, want an echo", answer)
	}
	return err
}

type connections []*connection

// connections opens connections from outside and from the node, and from the node by its local addresses.
func (m *machine) connections(t *testing.T, local ...string) connections {
	t.Helper()
	node := testenv.NodeAddr4.String()
	all := connections{m.connect(t, m.Outside, node), m.connect(t, m.Node, node)}
	for _, addr := range local {
		all = append(all, m.connect(t, m.Node, addr))
	}
	return all
}

func (all connections) want(t *testing.T, when string) {
	t.Helper()
	for _, c := range all {
		if err := c.ask(); err != nil {
			t.Errorf("%s: connection of %v: %v", when, c.LocalAddr(), err)
		}
	}
}
