package main

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// udpPackets has one thread that sends a batch and receives it, in turns: all that a packet
// costs at both ends, without the scheduler, and without a queue that could overflow. The packets
// that count all go one way.
func udpPackets(e ends, slice time.Duration) (got sample, err error) {
	server, err := openServer(e)
	if err != nil {
		return got, err
	}
	defer closeSocket(server)
	err = on(e.client, func() error {
		client, err := connectSocket(unix.SOCK_DGRAM, addressOf(e.dial))
		if err != nil {
			return err
		}
		defer closeSocket(client)
		out, in := newBatch(), newBatch()
		arrived, lost := 0, 0
		turn := func() error {
			sent, err := out.send(client)
			if err != nil {
				return err
			}
			n, err := in.receiveAll(server, sent)
			arrived += n
			lost += sent - n
			return err
		}
		if err := greet(client, server); err != nil {
			return err
		}
		meter := newMeter(slice, shortPart)
		got, err = meter.run(turn)
		got.rate *= batchSize * (1 - float64(lost)/float64(arrived+lost))
		got.lost, got.p50, got.p99 = lost, 0, 0 // a turn is no unit
		return err
	})
	return got, err
}

// greet exchanges some packets, as protocols over UDP do: to a host's stack a connection without an
// answer is not an established one.
func greet(client, server int) error {
	data := make([]byte, packetSize)
	for range 3 {
		if _, err := write(client, data); err != nil {
			return err
		}
		if _, err := answer(server, data); err != nil {
			return fmt.Errorf("server, before the first answer: %w", err)
		}
		if _, err := read(client, data); err != nil {
			return fmt.Errorf("client, waiting for the answer: %w", err)
		}
	}
	return nil
}

// openServer makes the server's socket, to be used by the client's thread.
func openServer(e ends) (fd int, err error) {
	err = e.server.Do(func() error {
		if fd, err = bindSocket(unix.SOCK_DGRAM, addressOf(e.listen)); err != nil {
			return fmt.Errorf("listen on %s: %w", e.listen, err)
		}
		soon := unix.NsecToTimeval((100 * time.Millisecond).Nanoseconds())
		return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &soon)
	})
	return fd, err
}

// receiveAll returns how many packets came: fewer than wanted when no more come for a while.
func (b *batch) receiveAll(fd, wanted int) (int, error) {
	arrived := 0
	for arrived < wanted {
		n, err := b.receive(fd, wanted-arrived)
		if errors.Is(err, unix.EAGAIN) {
			return arrived, nil
		}
		if err != nil {
			return arrived, err
		}
		arrived += n
	}
	return arrived, nil
}

// udpRoundTrip sends a packet of 64 bytes there and back. One that is lost costs patience, and
// ends the slice.
func udpRoundTrip(e ends, slice time.Duration) (got sample, err error) {
	server := func(fd int) error {
		data := make([]byte, packetSize)
		for {
			n, err := answer(fd, data)
			if err != nil || n < packetSize { // a short one is the last
				return err
			}
		}
	}
	return got, betweenTwo(e, unix.SOCK_DGRAM, server, func() error {
		fd, err := connectSocket(unix.SOCK_DGRAM, addressOf(e.dial))
		if err != nil {
			return err
		}
		defer closeSocket(fd)
		data := make([]byte, packetSize)
		got, err = newMeter(slice, shortPart).run(func() error { return request(fd, data) })
		return errors.Join(err, request(fd, data[:1]))
	})
}
