package testenv

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
)

// maxDatagram fits any UDP payload.
const maxDatagram = 1 << 16

// Client sends requests to an echo server over one socket. It is not safe for concurrent
// use.
type Client struct {
	conn   net.Conn
	reader *bufio.Reader // for TCP
	number int
}

// OffloadRequests is the number of requests of a connection after which the next packets of both sides bypass the stack, on
// whichever CPUs they are: each CPU leaves the first 8 or 9 packets of a side to the stack (OFFLOAD_AFTER in offload.h).
var OffloadRequests = (9 + 1) * runtime.NumCPU()

// NewClient connects to an echo server over "tcp" or "udp". With the zero local, the
// kernel chooses the address. The caller must close the client.
func NewClient(ctx context.Context, ns *Namespace, network string, local, remote netip.AddrPort) (*Client, error) {
	conn, err := ns.DialFrom(ctx, network, local, remote)
	if err != nil {
		return nil, err
	}
	c := &Client{conn: conn}
	if network == "tcp" {
		c.reader = bufio.NewReader(conn)
	}
	return c, nil
}

// Local returns the client's own address.
func (c *Client) Local() netip.AddrPort { return addrPort(c.conn.LocalAddr()) }

// Reset ends the connection with an RST, which frees the port at once.
func (c *Client) Reset() error {
	if conn, ok := c.conn.(*net.TCPConn); ok {
		if err := conn.SetLinger(0); err != nil {
			return err
		}
	}
	return c.conn.Close()
}

// Close closes the socket.
func (c *Client) Close() error { return c.conn.Close() }

// Ask sends payload, which must not contain a newline, once and waits for the reply until ctx
// ends. It skips replies to earlier requests. An ICMP error for a UDP socket is an error here,
// such as ECONNREFUSED.
func (c *Client) Ask(ctx context.Context, payload string) (Reply, error) {
	defer abortOn(ctx, c.conn)()
	c.number++
	number := strconv.Itoa(c.number)
	if _, err := io.WriteString(c.conn, number+" "+payload+"\n"); err != nil {
		return Reply{}, contextError(ctx, err)
	}
	for {
		text, err := c.read()
		if err != nil {
			return Reply{}, contextError(ctx, err)
		}
		got, reply, err := parseReply(strings.TrimSuffix(text, "\n"))
		if err != nil {
			return Reply{}, err
		}
		if got != number {
			continue
		}
		if reply.Payload != payload {
			return Reply{}, fmt.Errorf("server %s changed the payload: %d bytes for %d",
				reply.Server, len(reply.Payload), len(payload))
		}
		return reply, nil
	}
}

func (c *Client) read() (string, error) {
	if c.reader != nil {
		return c.reader.ReadString('\n')
	}
	buf := make([]byte, maxDatagram)
	n, err := c.conn.Read(buf)
	return string(buf[:n]), err
}

// Ask sends one request to an echo server, over its own socket.
func Ask(ctx context.Context, ns *Namespace, network string, remote netip.AddrPort, payload string) (Reply, error) {
	c, err := NewClient(ctx, ns, network, netip.AddrPort{}, remote)
	if err != nil {
		return Reply{}, err
	}
	defer c.Close()
	return c.Ask(ctx, payload)
}

// contextError adds the cause of the end of ctx to an error that abortOn caused.
func contextError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	return err
}
