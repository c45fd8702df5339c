package scenario

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Four pods open short connections to one remote address and port, as to a database or a resolver. In netfilter's
// state times, 300 connections per second for ten minutes leave 36,000 in TIME_WAIT, and 300 questions per second
// 9,000 UDP flows. A test runs more than that as fast as the machine can.

const clientPods = 4

// short is a kind of short connections.
type short struct {
	protocol string
	// serverCloses: the server closes first.
	serverCloses bool
	number       int
}

func TestShortConnections(t *testing.T) {
	for _, tc := range []struct {
		name string
		short
		few int // number without -long, where the node has few ports
	}{
		{"TCP, client closes", short{"tcp", false, 40_000}, 6_000},
		{"TCP, server closes", short{"tcp", true, 40_000}, 6_000},
		{"UDP", short{"udp", false, 13_000}, 3_000},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNetwork(t)
			kind := tc.short
			if !*long {
				n.fewPorts(t)
				kind.number = tc.few
			}
			var pods []*testenv.Pod
			for i := range clientPods {
				pods = append(pods, n.AddPod(t, fmt.Sprintf("client%d", i), nil))
			}
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				server := kind.serve(t, n.Outside, at(f.Outside, 5353))
				before, start := n.noPortDrops(t), time.Now()
				kind.openAll(t, pods, server)
				seconds := time.Since(start).Seconds()
				t.Logf("up to %d connections in %.1f s: %.0f per second", kind.number, seconds, float64(kind.number)/seconds)
				if drops := n.noPortDrops(t) - before; drops > 0 {
					t.Errorf("packets dropped for lack of a port: got %d, want none", drops)
				}
			})
		})
	}
}

// serve starts a server that replies once to each client.
func (s short) serve(t *testing.T, ns *testenv.Namespace, addr netip.AddrPort) netip.AddrPort {
	t.Helper()
	if s.protocol == "udp" {
		replyToAll(t, ns, addr)
		return addr
	}
	listener, err := ns.Listen(testenv.Context(t), addr)
	testenv.Must(t, err)
	var wg sync.WaitGroup
	t.Cleanup(func() { listener.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { s.reply(conn) })
		}
	})
	return addr
}

// reply replies to a client. What goes wrong, the client notices.
func (s short) reply(conn net.Conn) {
	defer conn.Close()
	buf := make([]byte, 1)
	_ = conn.SetDeadline(time.Now().Add(testenv.Timeout))
	if _, err := io.ReadFull(conn, buf); err != nil {
		return
	}
	if _, err := conn.Write(buf); err != nil || s.serverCloses {
		return
	}
	_, _ = conn.Read(buf) // the client's FIN
}

// openAll opens the connections from all pods, many at once, and stops after the first failure.
func (s short) openAll(t *testing.T, pods []*testenv.Pod, server netip.AddrPort) {
	t.Helper()
	const workers = 64 // of each pod

	var (
		wg      sync.WaitGroup
		started atomic.Int64
		failed  atomic.Bool
	)
	for _, pod := range pods {
		for range workers {
			wg.Go(func() {
				err := pod.Do(func() error {
					for !failed.Load() {
						number := started.Add(1)
						if number > int64(s.number) {
							return nil
						}
						if err := s.open(server); err != nil {
							return fmt.Errorf("connection %d, from %s: %w", number, pod.Name, err)
						}
					}
					return nil
				})
				if err != nil && !failed.Swap(true) {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
}

// open opens one connection from this thread's namespace, asks, and closes it.
func (s short) open(server netip.AddrPort) (err error) {
	// Long enough for a few SYNs: the server may have the same address and port in TIME_WAIT.
	const patience = testenv.Timeout

	kind := unix.SOCK_STREAM
	if s.protocol == "udp" {
		kind = unix.SOCK_DGRAM
	}
	family, sockaddr := sockaddrOf(server)
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	timeout := unix.NsecToTimeval(patience.Nanoseconds())
	for _, option := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &timeout); err != nil {
			return err
		}
	}
	if err := retry(func() error { return unix.Connect(fd, sockaddr) }); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if _, err := unix.Write(fd, []byte("x")); err != nil {
		return fmt.Errorf("ask: %w", err)
	}
	buf := make([]byte, 1)
	if err := readAll(fd, buf); err != nil {
		return fmt.Errorf("reply: %w", err)
	}
	if s.serverCloses {
		if err := readAll(fd, buf); !errors.Is(err, io.EOF) {
			return fmt.Errorf("end: got %w, want %w", err, io.EOF)
		}
	}
	return nil
}

func readAll(fd int, buf []byte) error {
	return retry(func() error {
		n, err := unix.Read(fd, buf)
		if err == nil && n == 0 {
			return io.EOF
		}
		return err
	})
}

// retry repeats a call that a signal has interrupted.
func retry(call func() error) error {
	for {
		if err := call(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func sockaddrOf(addr netip.AddrPort) (family int, sockaddr unix.Sockaddr) {
	if addr.Addr().Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Addr: addr.Addr().As16(), Port: int(addr.Port())}
}
