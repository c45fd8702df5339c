// Package echo asks hosts that need not know of it: by ICMP echoes whether they answer, and how long packets may be that
// get there undivided; by datagrams to ports that nobody has whether their checksums are right on the way.
package echo

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	headersICMP = 8
	headers4    = 20 + headersICMP
	headers6    = 40 + headersICMP

	small = 64 // bytes behind them
	tries = 2  // a packet may be lost
)

// RoundTrip returns how long addr takes to answer a small packet.
func RoundTrip(addr netip.Addr, wait time.Duration) (time.Duration, error) {
	return ask(addr, small, wait)
}

// Long returns nil if addr answers an IP packet of a size.
func Long(addr netip.Addr, size int, wait time.Duration) error {
	_, err := ask(addr, size-headersOf(addr), wait)
	return err
}

// ask sends a request with so many bytes, until there is an answer or an error.
func ask(addr netip.Addr, bytes int, wait time.Duration) (trip time.Duration, err error) {
	for range tries {
		trip, err = askOnce(addr, bytes, wait)
		if errno := unix.Errno(0); errors.As(err, &errno) {
			return 0, errno // without the socket's addresses
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return trip, err
		}
	}
	return 0, fmt.Errorf("no answer within %v", tries*wait)
}

func askOnce(addr netip.Addr, bytes int, wait time.Duration) (time.Duration, error) {
	conn, err := dial(addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	request, answer := message(addr, bytes)
	sent := time.Now()
	if err := conn.SetDeadline(sent.Add(wait)); err != nil {
		return 0, err
	}
	if _, err := conn.Write(request); err != nil {
		return 0, err
	}
	for buffer := make([]byte, headers6+len(request)); ; { // IPv4's header is read, too, and taken off
		n, _, err := conn.ReadFromIP(buffer)
		if err != nil {
			return 0, err
		}
		if n == len(request) && isAnswer(buffer, answer) {
			return time.Since(sent), nil
		}
	}
}

// isAnswer compares all but the checksum.
func isAnswer(message, answer []byte) bool {
	return [2]byte(message) == [2]byte(answer) && string(message[4:8]) == string(answer[4:8])
}

// message returns a request, and how its answer begins but for the checksum.
func message(addr netip.Addr, bytes int) (request, answer []byte) {
	const request4, answer4, request6, answer6 = 8, 0, 128, 129

	request = make([]byte, headersICMP+bytes)
	binary.BigEndian.PutUint32(request[4:], rand.Uint32()) // number of the asker, and of the request
	answer = append(answer, request[:headersICMP]...)
	if addr.Is4() {
		request[0], answer[0] = request4, answer4
		binary.BigEndian.PutUint16(request[2:], checksum(request))
	} else {
		request[0], answer[0] = request6, answer6 // the kernel writes the checksum
	}
	return request, answer
}

func checksum(message []byte) uint16 {
	sum := uint32(0)
	for i, b := range message {
		if i%2 == 0 {
			sum += uint32(b) << 8
		} else {
			sum += uint32(b)
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// dial returns a socket whose packets are not divided.
func dial(addr netip.Addr) (*net.IPConn, error) {
	network, level, option, never := "ip6:ipv6-icmp", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO
	if addr.Is4() {
		network, level, option, never = "ip4:icmp", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO
	}
	conn, err := net.DialIP(network, nil, &net.IPAddr{IP: addr.AsSlice()})
	if err != nil {
		return nil, err
	}
	err = control(conn, func(fd int) error { return unix.SetsockoptInt(fd, level, option, never) })
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func control(conn syscall.Conn, call func(fd int) error) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var callErr error
	err = raw.Control(func(fd uintptr) { callErr = call(int(fd)) })
	return errors.Join(err, callErr)
}
