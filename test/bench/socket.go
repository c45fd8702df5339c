package main

import (
	"encoding/binary"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Sockets by plain system calls: the scheduler and the poller of package net would be a large
// part of a packet's cost. RawSyscall bypasses the scheduler as well, so a waiting thread keeps its
// processor, and the garbage collector must not run (see pauseGC).

// waitLimit bounds each wait for the other end. After that, a packet was lost.
var waitLimit = 2 * time.Second

// address is a socket address as the kernel reads it.
type address struct {
	raw  [unix.SizeofSockaddrInet6]byte
	size int
}

func addressOf(to netip.AddrPort) *address {
	a := new(address)
	family, ip := unix.AF_INET, to.Addr().AsSlice()
	at := 4 // sin_addr
	a.size = unix.SizeofSockaddrInet4
	if to.Addr().Is6() {
		family, at, a.size = unix.AF_INET6, 8, unix.SizeofSockaddrInet6
	}
	binary.NativeEndian.PutUint16(a.raw[:], uint16(family))
	binary.BigEndian.PutUint16(a.raw[2:], to.Port())
	copy(a.raw[at:], ip)
	return a
}

func (a *address) family() int { return int(binary.NativeEndian.Uint16(a.raw[:])) }

// call repeats a system call that a signal interrupts.
//
//go:uintptrescapes
func call(trap, a, b, c, d uintptr) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(trap, a, b, c, d, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return 0, errno
		}
		return int(n), nil
	}
}

// openSocket opens a socket with timeouts of waitLimit.
func openSocket(family, kind int) (int, error) {
	fd, err := call(unix.SYS_SOCKET, uintptr(family), uintptr(kind|unix.SOCK_CLOEXEC), 0, 0)
	if err != nil {
		return -1, err
	}
	return fd, limitWaits(fd)
}

func limitWaits(fd int) error {
	limit := unix.NsecToTimeval(waitLimit.Nanoseconds())
	for _, option := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &limit); err != nil {
			return err
		}
	}
	return nil
}

// bindSocket opens a socket bound to own. A stream socket listens.
func bindSocket(kind int, own *address) (int, error) {
	fd, err := openSocket(own.family(), kind)
	if err != nil {
		return -1, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		_, err = call(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&own.raw)), uintptr(own.size), 0)
	}
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, unix.SOMAXCONN)
	}
	if err != nil {
		closeSocket(fd)
		return -1, err
	}
	return fd, nil
}

// connectSocket opens a socket connected to an address.
func connectSocket(kind int, to *address) (int, error) {
	fd, err := openSocket(to.family(), kind)
	if err != nil {
		return -1, err
	}
	if _, err := call(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to.raw)), uintptr(to.size), 0); err != nil {
		closeSocket(fd)
		return -1, err
	}
	return fd, nil
}

func acceptSocket(fd int) (int, error) {
	return call(unix.SYS_ACCEPT4, uintptr(fd), 0, 0, unix.SOCK_CLOEXEC)
}

func closeSocket(fd int) { unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

func noDelay(fd int) error {
	return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
}

func write(fd int, data []byte) (int, error) {
	return call(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), unix.MSG_NOSIGNAL)
}

// read returns 0 at the end of a connection.
func read(fd int, data []byte) (int, error) {
	return call(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), 0)
}

// echo receives one packet and sends it back to its source.
func echo(fd int, data []byte) (n int, err error) {
	var from address
	size := uint32(len(from.raw))
	for {
		got, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), 0,
			uintptr(unsafe.Pointer(&from.raw)), uintptr(unsafe.Pointer(&size)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return 0, errno
		}
		n = int(got)
		break
	}
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(n), 0,
			uintptr(unsafe.Pointer(&from.raw)), uintptr(size))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return 0, errno
		}
		return n, nil
	}
}

// batch holds the packets of one sendmmsg or recvmmsg.
type batch struct {
	headers [batchSize]mmsghdr
	vectors [batchSize]unix.Iovec
	data    [batchSize][packetSize]byte
}

const (
	batchSize  = 32
	packetSize = 64
)

type mmsghdr struct {
	header unix.Msghdr
	_      uint32 // the received length, which is not used
}

func newBatch() *batch {
	b := new(batch)
	for i := range b.headers {
		b.vectors[i].Base = &b.data[i][0]
		b.vectors[i].SetLen(packetSize)
		b.headers[i].header.Iov = &b.vectors[i]
		b.headers[i].header.SetIovlen(1)
	}
	return b
}

func (b *batch) send(fd int) (int, error) {
	return call(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&b.headers)), batchSize, 0)
}

// receive waits for at least one packet and receives up to limit.
func (b *batch) receive(fd, limit int) (int, error) {
	return call(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&b.headers)), uintptr(limit), unix.MSG_WAITFORONE)
}
