package main

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// streamSize is the size of one write or read of a stream: larger than any BIG TCP packet.
const streamSize = 256 << 10

// tcpStream has the client send as fast as it can. The server counts, and closes the connection.
func tcpStream(e ends, slice time.Duration) (got sample, err error) {
	in, out := make([]byte, streamSize), make([]byte, streamSize)
	for i := range in { // fault in the pages
		in[i], out[i] = 1, 1
	}
	server := func(listener int) error {
		fd, err := acceptSocket(listener)
		if err != nil {
			return err
		}
		defer closeSocket(fd)
		got, err = countBytes(fd, in, slice)
		return err
	}
	return got, clientAndServer(e, unix.SOCK_STREAM, server, func() error {
		fd, err := connectSocket(unix.SOCK_STREAM, addressOf(e.dial))
		if err != nil {
			return err
		}
		defer closeSocket(fd)
		for {
			_, err := write(fd, out)
			if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) { // the server is done
				return nil
			}
			if err != nil {
				return err
			}
		}
	})
}

func countBytes(fd int, data []byte, slice time.Duration) (got sample, err error) {
	clock := newClock(slice, slice/4) // the scheduler runs each end for milliseconds at a time
	for {
		n, err := read(fd, data)
		if err != nil {
			return got, err
		}
		if n == 0 {
			return got, errors.New("the stream ended early")
		}
		now := time.Now()
		clock.add(now, n)
		if clock.over(now) {
			got.rate, err = clock.rate()
			return got, err
		}
	}
}

// tcpRoundTrip sends one byte back and forth on one connection.
func tcpRoundTrip(e ends, slice time.Duration) (got sample, err error) {
	server := func(listener int) error {
		fd, err := acceptSocket(listener)
		if err != nil {
			return err
		}
		defer closeSocket(fd)
		if err := noDelay(fd); err != nil {
			return err
		}
		data := make([]byte, 1)
		for {
			n, err := read(fd, data)
			if n == 0 || err != nil {
				return err
			}
			if _, err := write(fd, data); err != nil {
				return err
			}
		}
	}
	return got, clientAndServer(e, unix.SOCK_STREAM, server, func() error {
		fd, err := connectSocket(unix.SOCK_STREAM, addressOf(e.dial))
		if err != nil {
			return err
		}
		defer closeSocket(fd)
		if err := noDelay(fd); err != nil {
			return err
		}
		data := make([]byte, 1)
		got, err = newMeter(slice, shortPart).run(func() error { return request(fd, data) })
		return err
	})
}

// connectRequestClose makes a connection for each byte.
func connectRequestClose(e ends, slice time.Duration) (got sample, err error) {
	server := func(listener int) error {
		data := make([]byte, 1)
		for {
			fd, err := acceptSocket(listener)
			if err != nil {
				return err
			}
			if _, err = read(fd, data); err == nil {
				_, err = write(fd, data)
			}
			closeSocket(fd)
			if err != nil || data[0] == last {
				return err
			}
		}
	}
	return got, clientAndServer(e, unix.SOCK_STREAM, server, func() (err error) {
		data, to := make([]byte, 1), addressOf(e.dial)
		once := func() error {
			fd, err := connectSocket(unix.SOCK_STREAM, to)
			if err != nil {
				return err
			}
			defer closeSocket(fd)
			return request(fd, data)
		}
		got, err = newMeter(slice, longPart).run(once)
		data[0] = last
		return errors.Join(err, once())
	})
}

// request sends data and waits for the reply.
func request(fd int, data []byte) error {
	if _, err := write(fd, data); err != nil {
		return err
	}
	n, err := read(fd, data)
	if err == nil && n == 0 {
		err = errors.New("closed without a reply")
	}
	return err
}
