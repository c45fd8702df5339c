package echo

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Checksum says who computes that of a datagram.
type Checksum int

// The two ways of a checksum. Where a device computes none, both are the kernel's.
const (
	ByDevice Checksum = iota // as most packets of sockets have it
	ByKernel
)

// Closed returns nil if addr says that nobody has a UDP port, of those that traceroute uses: then a datagram has arrived
// with a checksum that is right. A silence means that it has not, or that somebody drops it.
func Closed(addr netip.Addr, checksum Checksum, wait time.Duration) (err error) {
	const first, count = 33434, 90

	for range tries {
		err = Refused(netip.AddrPortFrom(addr, first+uint16(rand.IntN(count))), checksum, wait)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
	}
	return fmt.Errorf("no answer within %v", tries*wait)
}

// Refused returns nil if the host of remote says that nobody has its UDP port, and os.ErrDeadlineExceeded if it says
// nothing.
func Refused(remote netip.AddrPort, checksum Checksum, wait time.Duration) error {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(remote))
	if err != nil {
		return err
	}
	defer conn.Close()
	err = conn.SetDeadline(time.Now().Add(wait))
	if err == nil {
		err = write(conn, checksum)
	}
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
	}
	errno := unix.Errno(0)
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return nil
	case err == nil:
		return fmt.Errorf("somebody has UDP port %d", remote.Port())
	case errors.As(err, &errno):
		return errno // without the socket's addresses
	default:
		return err
	}
}

// write sends a datagram. One that is corked may be written in pieces, so the kernel adds up their checksums itself.
func write(conn *net.UDPConn, checksum Checksum) error {
	cork := func(on int) func(int) error {
		return func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_CORK, on) }
	}
	datagram := make([]byte, small)
	if checksum == ByDevice {
		_, err := conn.Write(datagram)
		return err
	}
	if err := control(conn, cork(1)); err != nil {
		return err
	}
	if _, err := conn.Write(datagram); err != nil {
		return err
	}
	return control(conn, cork(0)) // sends it
}
