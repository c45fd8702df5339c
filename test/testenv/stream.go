package testenv

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Stream is a UDP connection to an echo server that carries numbered datagrams at a steady rate.
type Stream struct {
	name     string
	server   *net.UDPConn
	client   net.Conn
	stopping atomic.Bool
	sender   sync.WaitGroup
	readers  sync.WaitGroup

	mu               sync.Mutex
	sent             []time.Time
	arrived, replied map[uint64]bool
}

// StartStream sends a datagram at each interval, or less often where a CPU is busy. The server is in namespace to and
// listens on listen; the client sends to dial. It returns when the first reply has come. The end of the test stops it.
func StartStream(tb TB, from, to *Namespace, listen, dial netip.AddrPort, interval time.Duration) *Stream {
	tb.Helper()
	s := &Stream{name: fmt.Sprintf("%s to %v, served by %s", from.Name, dial, to.Name), arrived: map[uint64]bool{}, replied: map[uint64]bool{}}
	if err := s.open(Context(tb), from, to, listen, dial); err != nil {
		tb.Fatalf("stream from %s: %v", s.name, err)
	}
	tb.Cleanup(s.close)
	s.sender.Go(func() { s.send(interval) })
	s.readers.Go(s.echo)
	s.readers.Go(s.receive)
	Eventually(tb, "the first reply of the stream from "+s.name, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.replied) == 0 {
			return fmt.Errorf("got none for %d datagrams", len(s.sent))
		}
		return nil
	})
	return s
}

func (s *Stream) open(ctx context.Context, from, to *Namespace, listen, dial netip.AddrPort) (err error) {
	if s.server, err = to.ListenPacket(ctx, listen); err != nil {
		return err
	}
	if s.client, err = from.Dial(ctx, "udp", dial); err != nil {
		return errors.Join(err, s.server.Close())
	}
	return errors.Join(enlargeBuffer(s.server), enlargeBuffer(s.client.(*net.UDPConn)))
}

// enlargeBuffer has a socket lose nothing while its reader waits for a CPU.
func enlargeBuffer(conn *net.UDPConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var errSet error
	err = raw.Control(func(fd uintptr) {
		errSet = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
	})
	return errors.Join(err, errSet)
}

func (s *Stream) send(interval time.Duration) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for number := uint64(0); !s.stopping.Load(); number++ {
		<-ticker.C
		s.mu.Lock()
		s.sent = append(s.sent, time.Now())
		s.mu.Unlock()
		_, _ = s.client.Write(binary.BigEndian.AppendUint64(nil, number)) // one that fails is lost
	}
}

func (s *Stream) echo() {
	buffer := make([]byte, 8)
	for {
		_, peer, err := s.server.ReadFromUDPAddrPort(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			s.note(s.arrived, buffer)
			_, _ = s.server.WriteToUDPAddrPort(buffer, peer)
		}
	}
}

func (s *Stream) receive() {
	buffer := make([]byte, 8)
	for {
		_, err := s.client.Read(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			s.note(s.replied, buffer)
		}
	}
}

func (s *Stream) note(seen map[uint64]bool, datagram []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen[binary.BigEndian.Uint64(datagram)] = true
}

// Lost is a datagram that did not arrive, or whose reply did not.
type Lost struct {
	Sent    time.Time
	IsReply bool
}

// Finish sends no more.
func (s *Stream) Finish() {
	s.stopping.Store(true)
	s.sender.Wait()
}

// Stop sends no more, and waits until all replies have come, or ctx ends: what has not come by then is lost.
func (s *Stream) Stop(ctx context.Context) (sent int, lost []Lost) {
	s.Finish()
	_ = Wait(ctx, "the last replies", func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.replied) < len(s.sent) {
			return errors.New("some are missing")
		}
		return nil
	})
	s.close()
	for number, when := range s.sent {
		if !s.replied[uint64(number)] {
			lost = append(lost, Lost{when, s.arrived[uint64(number)]})
		}
	}
	return len(s.sent), lost
}

// String returns who sends to whom.
func (s *Stream) String() string { return s.name }

func (s *Stream) close() {
	s.Finish()
	s.client.Close()
	s.server.Close()
	s.readers.Wait()
}
