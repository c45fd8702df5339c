package main

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// udpPackets sends a batch and receives it in turns on one thread. This is the whole cost of a
// packet at both ends, without the scheduler and without queues that overflow. All counted packets
// go from client to server.
func udpPackets(e ends, slice time.Duration) (got sample, err error) {
	server, err := openServer(e)
	if err != nil {
		return got, err
	}
	defer closeSocket(server)
	err = onCPU(e.client, e.cpu, func() error {
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
		got.lost, got.p50, got.p99, got.p999 = lost, 0, 0, 0 // a turn is not a round trip
		return err
	})
	return got, err
}

// greet exchanges some packets, as protocols over UDP do: conntrack takes a connection without a
// reply for a new one.
func greet(client, server int) error {
	data := make([]byte, packetSize)
	for range 3 {
		if _, err := write(client, data); err != nil {
			return err
		}
		if _, err := echo(server, data); err != nil {
			return fmt.Errorf("server, waiting for a request: %w", err)
		}
		if _, err := read(client, data); err != nil {
			return fmt.Errorf("client, waiting for the reply: %w", err)
		}
	}
	return nil
}

// openServer opens the server's socket, which the client's thread uses.
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

// receiveAll returns how many packets arrived: fewer than count if the socket timed out.
func (b *batch) receiveAll(fd, count int) (int, error) {
	arrived := 0
	for arrived < count {
		n, err := b.receive(fd, count-arrived)
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

// udpRoundTrip sends a packet of 64 bytes back and forth. A lost one costs waitLimit and ends the
// slice.
func udpRoundTrip(e ends, slice time.Duration) (got sample, err error) {
	return got, clientAndServer(e, unix.SOCK_DGRAM, echoPackets, func() error {
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

// udpQuestion asks one question of 64 bytes from a new port each time, as DNS clients do.
func udpQuestion(e ends, slice time.Duration) (got sample, err error) {
	return got, clientAndServer(e, unix.SOCK_DGRAM, echoPackets, func() error {
		data, to := make([]byte, packetSize), addressOf(e.dial)
		ask := func(question []byte) error {
			fd, err := connectSocket(unix.SOCK_DGRAM, to)
			if err != nil {
				return err
			}
			defer closeSocket(fd)
			return request(fd, question)
		}
		got, err = newMeter(slice, longPart).run(func() error { return ask(data) })
		return errors.Join(err, ask(data[:1]))
	})
}

// echoPackets sends packets back. The client marks the last one by its length.
func echoPackets(fd int) error {
	data := make([]byte, packetSize)
	for {
		n, err := echo(fd, data)
		if err != nil || n < packetSize {
			return err
		}
	}
}
