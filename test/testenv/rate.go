package testenv

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"time"
)

// Flood is traffic at full speed from one namespace to another.
type Flood struct {
	received atomic.Int64 // bytes of payload
	v6, udp  bool
	cancel   func()
	sockets  []io.Closer
}

const datagramSize = 1400

// StartFlood sends over the given number of TCP connections, or over UDP for 0, from one namespace to
// a server in another one. The server listens on listen, and clients connect to dial. The end of the
// test stops it.
func StartFlood(tb TB, from, to *Namespace, listen, dial netip.AddrPort, connections int) *Flood {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &Flood{v6: listen.Addr().Is6(), udp: connections == 0, cancel: cancel}
	tb.Cleanup(f.Stop)
	var err error
	if f.udp {
		err = f.startUDP(ctx, from, to, listen, dial)
	} else {
		err = f.startTCP(ctx, from, to, listen, dial, connections)
	}
	if err != nil {
		tb.Fatalf("flood %s from %s: %v", to.Name, from.Name, err)
	}
	return f
}

// Stop stops the traffic.
func (f *Flood) Stop() {
	f.cancel()
	for _, socket := range f.sockets {
		socket.Close()
	}
	f.sockets = nil
}

func (f *Flood) startTCP(ctx context.Context, from, to *Namespace, listen, dial netip.AddrPort, connections int) error {
	listener, err := to.Listen(ctx, listen)
	if err != nil {
		return err
	}
	f.sockets = append(f.sockets, listener)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			context.AfterFunc(ctx, func() { conn.Close() })
			go f.receive(conn)
		}
	}()
	var opened []net.Conn // all, before the first fills a queue in which SYNs of others are lost
	for range connections {
		conn, err := from.Dial(ctx, "tcp", dial)
		if err != nil {
			return err
		}
		f.sockets, opened = append(f.sockets, conn), append(opened, conn)
	}
	for _, conn := range opened {
		go sendAll(ctx, conn, 1<<17)
	}
	return nil
}

func (f *Flood) startUDP(ctx context.Context, from, to *Namespace, listen, dial netip.AddrPort) error {
	server, err := to.ListenPacket(ctx, listen)
	if err != nil {
		return err
	}
	f.sockets = append(f.sockets, server)
	if err := server.SetReadBuffer(8 << 20); err != nil {
		return err
	}
	go f.receive(server)
	conn, err := from.Dial(ctx, "udp", dial)
	if err != nil {
		return err
	}
	f.sockets = append(f.sockets, conn)
	go sendAll(ctx, conn, datagramSize)
	return nil
}

func (f *Flood) receive(conn net.Conn) {
	buffer := make([]byte, 1<<20)
	for {
		n, err := conn.Read(buffer)
		if err != nil {
			return
		}
		f.received.Add(int64(n))
	}
}

// sendAll writes until ctx ends. It retries datagrams that a full queue refuses.
func sendAll(ctx context.Context, conn net.Conn, size int) {
	payload := make([]byte, size)
	for ctx.Err() == nil {
		if _, err := conn.Write(payload); err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// Rate measures the received bits per second during window, including all headers, as the queue of an
// Ethernet device counts them.
func (f *Flood) Rate(window time.Duration) float64 {
	const ethernet, ip4, ip6, udp, tcp, mtu = 14, 20, 40, 8, 20 + 12, 1500

	headers, payload := ethernet+ip4, mtu-ip4
	if f.v6 {
		headers, payload = ethernet+ip6, mtu-ip6
	}
	if f.udp {
		headers, payload = headers+udp, datagramSize
	} else {
		headers, payload = headers+tcp, payload-tcp
	}
	before, start := f.received.Load(), time.Now()
	time.Sleep(window)
	bytes := float64(f.received.Load() - before)
	return bytes * 8 / time.Since(start).Seconds() * float64(payload+headers) / float64(payload)
}
