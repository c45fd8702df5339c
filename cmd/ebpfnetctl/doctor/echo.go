package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// shortPing is the size of a packet that each link carries.
const shortPing = 100

// ping sends an ICMP echo request in an IP packet of a size, which is not divided, and returns how long the answer takes.
// It tries twice, because a packet may be lost.
func ping(addr netip.Addr, size int) (trip time.Duration, err error) {
	const wait, tries = time.Second, 2

	for range tries {
		trip, err = pingOnce(addr, size, wait)
		if errno := unix.Errno(0); errors.As(err, &errno) {
			return 0, errno // without the addresses of the socket
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return trip, err
		}
	}
	return 0, fmt.Errorf("no answer within %v", tries*wait)
}

func pingOnce(addr netip.Addr, size int, wait time.Duration) (time.Duration, error) {
	conn, headers, err := dialICMP(addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	request := echoRequest(addr, size-headers)
	sent := time.Now()
	if err := conn.SetDeadline(sent.Add(wait)); err != nil {
		return 0, err
	}
	if _, err := conn.Write(request); err != nil {
		return 0, err
	}
	const answer4, answer6 = 0, 129
	for buffer := make([]byte, size+headers); ; {
		n, _, err := conn.ReadFromIP(buffer)
		if err != nil {
			return 0, err
		}
		isAnswer := buffer[0] == answer4 && addr.Is4() || buffer[0] == answer6 && addr.Is6()
		if n == len(request) && isAnswer && string(buffer[4:8]) == string(request[4:8]) {
			return time.Since(sent), nil
		}
	}
}

// dialICMP returns a socket whose packets are not divided, and the length of their IP headers.
func dialICMP(addr netip.Addr) (conn *net.IPConn, headers int, err error) {
	network, headers, level, option, never := "ip6:ipv6-icmp", 40, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO
	if addr.Is4() {
		network, headers, level, option, never = "ip4:icmp", 20, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO
	}
	conn, err = net.DialIP(network, nil, &net.IPAddr{IP: addr.AsSlice()})
	if err != nil {
		return nil, 0, err
	}
	raw, err := conn.SyscallConn()
	if err == nil {
		errControl := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, never) })
		err = errors.Join(err, errControl)
	}
	if err != nil {
		conn.Close()
		return nil, 0, err
	}
	return conn, headers, nil
}

// echoRequest returns an ICMP message of a length with a random identifier and sequence number, and zeros behind them.
func echoRequest(addr netip.Addr, length int) []byte {
	const request4, request6 = 8, 128

	message := make([]byte, length)
	message[0] = request6 // the kernel writes the checksum
	binary.BigEndian.PutUint32(message[4:], rand.Uint32())
	if addr.Is4() {
		message[0] = request4
		sum := uint32(request4)<<8 + uint32(binary.BigEndian.Uint16(message[4:])) + uint32(binary.BigEndian.Uint16(message[6:]))
		sum = sum>>16 + sum&0xffff
		binary.BigEndian.PutUint16(message[2:], ^uint16(sum>>16+sum&0xffff))
	}
	return message
}
