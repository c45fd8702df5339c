package testenv

import (
	"context"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A socket belongs to the network namespace of the thread that opens it, and works from any thread
// afterwards. With a literal address, package net opens it on the calling goroutine.

// Listen opens a TCP listener in the namespace.
func (ns *Namespace) Listen(ctx context.Context, addr netip.AddrPort) (listener net.Listener, err error) {
	config := net.ListenConfig{KeepAlive: -1} // nothing is sent but what a test sends
	config.SetMultipathTCP(false)             // on by default
	err = ns.Do(func() error {
		listener, err = config.Listen(ctx, "tcp", addr.String())
		return err
	})
	return listener, err
}

// ListenPacket opens a UDP socket in the namespace.
func (ns *Namespace) ListenPacket(ctx context.Context, addr netip.AddrPort) (conn *net.UDPConn, err error) {
	err = ns.Do(func() error {
		packetConn, err := new(net.ListenConfig).ListenPacket(ctx, "udp", addr.String())
		if err != nil {
			return err
		}
		conn = packetConn.(*net.UDPConn)
		return nil
	})
	return conn, err
}

// DialFrom connects to remote from inside the namespace, over "tcp" or "udp". The kernel chooses the
// local address if local is zero, and the address or port if that is unspecified.
func (ns *Namespace) DialFrom(ctx context.Context, network string, local, remote netip.AddrPort) (conn net.Conn, err error) {
	dialer := net.Dialer{KeepAlive: -1}
	if network != "udp" { // for UDP, the kernel could choose a port twice
		dialer.Control = reuseAddr
	}
	if local.IsValid() {
		if network == "udp" {
			dialer.LocalAddr = net.UDPAddrFromAddrPort(local)
		} else {
			dialer.LocalAddr = net.TCPAddrFromAddrPort(local)
		}
	}
	err = ns.Do(func() error {
		conn, err = dialer.DialContext(ctx, network, remote.String())
		return err
	})
	return conn, err
}

// Dial connects to remote from inside the namespace, over "tcp" or "udp".
func (ns *Namespace) Dial(ctx context.Context, network string, remote netip.AddrPort) (net.Conn, error) {
	return ns.DialFrom(ctx, network, netip.AddrPort{}, remote)
}

// reuseAddr lets a client use a local port that has an older connection in TIME_WAIT.
func reuseAddr(_, _ string, raw syscall.RawConn) error {
	var sockErr error
	err := raw.Control(func(fd uintptr) {
		sockErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	if err != nil {
		return err
	}
	return sockErr
}

// abortOn makes operations of conn fail when ctx ends, until release is called. After that, conn has
// no deadline.
func abortOn(ctx context.Context, conn net.Conn) (release func()) {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(done)
		conn.SetDeadline(time.Unix(1, 0))
	})
	return func() {
		if !stop() {
			<-done
			conn.SetDeadline(time.Time{})
		}
	}
}

// addrPort converts a socket address, with IPv4-mapped addresses as IPv4.
func addrPort(addr net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch addr := addr.(type) {
	case *net.TCPAddr:
		ap = addr.AddrPort()
	case *net.UDPAddr:
		ap = addr.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
