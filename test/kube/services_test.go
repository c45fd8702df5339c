package kube

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// client is a connection to the web service.
type client struct {
	net.Conn
	node   *node // whose stack it may bypass
	reader *bufio.Reader
}

// connect opens a connection from a pod's network.
func (p pod) connect(network string, to netip.AddrPort) (*client, error) {
	path := p.node.run("sh", "-c", fmt.Sprintf(`grep -l '"%s"' /var/lib/cni/results/* | xargs grep -oh '/run/netns/[^"]*' | head -n 1`, p.name))
	c := &client{node: p.node}
	err := ns.WithNetNSPath(p.node.path(strings.TrimSpace(path)), func(ns.NetNS) (err error) {
		c.Conn, err = net.DialTimeout(network, to.String(), testenv.Timeout)
		return err
	})
	if err == nil {
		c.reader = bufio.NewReader(c.Conn)
	}
	return c, err
}

// ask returns the name of the server's pod. Over UDP, a packet may be lost: ask again.
func (c *client) ask() (server string, err error) {
	isUDP, patience := c.LocalAddr().Network() == "udp", testenv.Timeout
	if isUDP {
		patience = time.Second
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if isUDP {
		reply := make([]byte, 1024)
		if _, err := io.WriteString(c, "hostname"); err != nil {
			return "", err
		}
		n, err := c.Read(reply)
		return string(reply[:n]), err
	}
	if _, err := io.WriteString(c, "GET /hostname HTTP/1.1\r\nHost: web\r\n\r\n"); err != nil {
		return "", err
	}
	response, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(response.Body)
	return string(body), err
}

// awaitOffload asks until the node says that the connection bypasses its stack. All replies are of one server.
func (c *client) awaitOffload() (server string) {
	t, n := c.node.t, c.node
	t.Helper()
	testenv.Eventually(t, fmt.Sprintf("offload of %s %s to %s", c.LocalAddr().Network(), c.LocalAddr(), c.RemoteAddr()), func() error {
		for range 10 {
			got, err := c.ask()
			if err != nil && c.LocalAddr().Network() == "udp" {
				return err
			}
			if err != nil || server != "" && got != server {
				t.Fatalf("%s to %s: got a reply of %q (%v), want %q", c.LocalAddr(), c.RemoteAddr(), got, err, server)
			}
			server = got
		}
		var flows []struct{ Source, Path string }
		output := n.run("ebpfnetctl", "flows", "--output=json")
		if err := json.Unmarshal([]byte(output), &flows); err != nil {
			return err
		}
		for _, flow := range flows {
			if flow.Source == c.LocalAddr().String() && flow.Path == "offload" {
				return nil
			}
		}
		return fmt.Errorf("server %s: %v", server, flows)
	})
	return server
}

// testServiceOffload wants long connections to the service to bypass the stack, to the pods of all nodes, and of a pod to
// itself. Of UDP, they continue with another pod when theirs is deleted.
func (c *cluster) testServiceOffload() {
	testenv.Require(c.t, testenv.VisibleHooks)
	for _, addr := range c.serviceAddrs() {
		for _, network := range []string{"tcp", "udp"} {
			pods, mayRetarget := c.web(), network == "udp"
			c.awaitAll(fmt.Sprintf("%s to %s past the stack", network, addr), pods, func() (string, error) {
				client, err := pods[0].connect(network, netip.AddrPortFrom(addr, 80))
				if err != nil {
					return "", err
				}
				server := client.awaitOffload()
				if mayRetarget && server != pods[0].name {
					c.testRetarget(client, server)
					mayRetarget = false
				}
				return server, client.Close()
			})
		}
	}
}

// testRetarget deletes the pod that answers a client over UDP, and wants another to answer.
func (c *cluster) testRetarget(client *client, server string) {
	begin := time.Now()
	c.must("delete", "pod", server, "--wait=false")
	c.eventually("another server than "+server, func() error {
		got, err := client.ask()
		if err == nil && got == server {
			err = fmt.Errorf("got a reply of %s", got)
		}
		return err
	})
	c.t.Logf("%s: another pod after %s", client.LocalAddr(), time.Since(begin))
	if client.awaitOffload() == server {
		c.t.Errorf("got a reply of %s again", server)
	}
}

// testNodePortOffload wants long connections from outside to a node's port to bypass its stack, if it has the pod.
func (c *cluster) testNodePortOffload() {
	testenv.Require(c.t, testenv.VisibleHooks)
	for _, p := range c.web() {
		for _, addr := range p.node.addrs {
			for _, network := range []string{"tcp", "udp"} {
				to := netip.AddrPortFrom(addr, nodePort)
				c.awaitAll(fmt.Sprintf("%s to %s past the stack", network, to), []pod{p}, func() (string, error) {
					conn, err := c.router.Dial(testenv.Context(c.t), network, to)
					if err != nil {
						return "", err
					}
					defer conn.Close()
					client := &client{conn, p.node, bufio.NewReader(conn)}
					server, err := client.ask()
					if server == p.name {
						client.awaitOffload()
					}
					return server, err
				})
			}
		}
	}
}
