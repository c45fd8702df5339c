package main

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// poller waits for data on many sockets, by plain system calls as well.
type poller struct {
	fd     int
	events [clients + 1]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	return &poller{fd: fd}, err
}

func (p *poller) close() { closeSocket(p.fd) }

// add watches a socket until it is closed.
func (p *poller) add(fd int) error {
	event := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	_, err := call(unix.SYS_EPOLL_CTL, uintptr(p.fd), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(&event)))
	return err
}

// wait returns the sockets with data, at least one. The slice is valid until the next call.
func (p *poller) wait() ([]unix.EpollEvent, error) {
	n, err := call(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events)), uintptr(len(p.events)), uintptr(waitLimit.Milliseconds()))
	if err == nil && n == 0 {
		err = unix.EAGAIN // as a read that times out
	}
	return p.events[:n], err
}
