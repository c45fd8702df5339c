package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Types of echo messages: RFC 792 and RFC 4443.
const (
	echoRequest4, echoReply4 = 8, 0
	echoRequest6, echoReply6 = 128, 129

	echoHeaderLen = 8
)

// ping sends one echo request of as many bytes as the tool does, and returns after
// how long the reply came. It needs no tool, as a bare machine has none.
func ping(from *testenv.Namespace, to netip.Addr) (time.Duration, error) {
	network, local, request, reply := "ip4:icmp", "0.0.0.0", byte(echoRequest4), byte(echoReply4)
	if to.Is6() {
		network, local, request, reply = "ip6:ipv6-icmp", "::", echoRequest6, echoReply6
	}
	var conn net.PacketConn
	err := from.Do(func() (err error) {
		conn, err = net.ListenPacket(network, local)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	start := time.Now()
	if err := conn.SetDeadline(start.Add(patience)); err != nil {
		return 0, err
	}

	message := make([]byte, echoHeaderLen+56)
	message[0] = request
	binary.BigEndian.PutUint64(message[echoHeaderLen:], uint64(start.UnixNano()))
	binary.BigEndian.PutUint16(message[4:], uint16(start.UnixNano()>>10)) // the identifier
	if to.Is4() {
		binary.BigEndian.PutUint16(message[2:], checksum(message)) // IPv6's is made by the kernel
	}
	if _, err := conn.WriteTo(message, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		return 0, err
	}
	// The socket gets every ICMP message that reaches the namespace.
	answer := make([]byte, 2*len(message))
	for {
		n, _, err := conn.ReadFrom(answer)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return 0, fmt.Errorf("no answer within %v", patience)
		}
		if err != nil {
			return 0, err
		}
		if n == len(message) && answer[0] == reply && string(answer[4:n]) == string(message[4:]) {
			return time.Since(start), nil
		}
	}
}

// checksum is that of RFC 1071, over an even number of bytes.
func checksum(data []byte) uint16 {
	var sum uint32
	for ; len(data) > 1; data = data[2:] {
		sum += uint32(binary.BigEndian.Uint16(data))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
