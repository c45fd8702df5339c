package testenv

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
)

// Server serves in a namespace until it is closed, at the latest by the end of the test.
type Server struct {
	// Addr is the listening address. For port 0, it has the port that the kernel chose.
	Addr netip.AddrPort

	name  string
	close func()
}

// Close stops the server, closes its connections and waits for its goroutines.
func (s *Server) Close() { s.close() }

// Reply is the reply of an echo server to a [Client].
type Reply struct {
	// Peer is the client's address as the server sees it.
	Peer netip.AddrPort
	// Server is the name of the server's namespace.
	Server string
	// Payload is the client's.
	Payload string
}

// An echo server replies to "N PAYLOAD" with "PEER SERVER N PAYLOAD": a line in TCP, a
// datagram in UDP. The client increments N to recognize late replies.

func (s *Server) reply(peer netip.AddrPort, request string) string {
	return fmt.Sprintf("%s %s %s", peer, s.name, request)
}

func parseReply(text string) (number string, reply Reply, err error) {
	fields := strings.SplitN(text, " ", 4)
	if len(fields) != 4 {
		return "", Reply{}, fmt.Errorf("malformed reply %.100q", text)
	}
	peer, err := netip.ParseAddrPort(fields[0])
	if err != nil {
		return "", Reply{}, fmt.Errorf("malformed reply %.100q: %w", text, err)
	}
	return fields[2], Reply{Peer: peer, Server: fields[1], Payload: fields[3]}, nil
}

// ServeTCP starts a TCP echo server for [Client] in the namespace.
func ServeTCP(tb TB, ns *Namespace, addr netip.AddrPort) *Server {
	tb.Helper()
	listener, err := ns.Listen(Context(tb), addr)
	if err != nil {
		tb.Fatalf("start TCP server in %s: %v", ns.Name, err)
	}
	s := &Server{Addr: addrPort(listener.Addr()), name: ns.Name}

	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		conns = make(map[net.Conn]bool) // nil after Close
	)
	serve := func(conn net.Conn) {
		defer conn.Close()
		defer func() { mu.Lock(); delete(conns, conn); mu.Unlock() }()
		peer, reader := addrPort(conn.RemoteAddr()), bufio.NewReader(conn)
		for {
			request, err := reader.ReadString('\n')
			if err != nil {
				return
			}
			if _, err := conn.Write([]byte(s.reply(peer, request))); err != nil {
				return
			}
		}
	}
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if conns == nil {
				conn.Close()
			} else {
				conns[conn] = true
				wg.Go(func() { serve(conn) })
			}
			mu.Unlock()
		}
	})
	s.close = sync.OnceFunc(func() {
		listener.Close()
		mu.Lock()
		for conn := range conns {
			conn.Close()
		}
		conns = nil
		mu.Unlock()
		wg.Wait()
	})
	tb.Cleanup(s.Close)
	return s
}

// ServeUDP starts a UDP echo server for [Client] in the namespace. On an unspecified address,
// the kernel chooses the source of its replies.
func ServeUDP(tb TB, ns *Namespace, addr netip.AddrPort) *Server {
	tb.Helper()
	conn, err := ns.ListenPacket(Context(tb), addr)
	if err != nil {
		tb.Fatalf("start UDP server in %s: %v", ns.Name, err)
	}
	s := &Server{Addr: addrPort(conn.LocalAddr()), name: ns.Name}

	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, maxDatagram)
		for {
			n, peer, err := conn.ReadFromUDPAddrPort(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue // an ICMP error for an earlier reply
			}
			plain := netip.AddrPortFrom(peer.Addr().Unmap(), peer.Port())
			// A failed reply is a lost one, which the client notices.
			_, _ = conn.WriteToUDPAddrPort([]byte(s.reply(plain, string(buf[:n]))), peer)
		}
	})
	s.close = sync.OnceFunc(func() {
		conn.Close()
		wg.Wait()
	})
	tb.Cleanup(s.Close)
	return s
}
