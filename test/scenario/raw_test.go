package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// rawSocket sends and receives an IP protocol without ports.
type rawSocket struct {
	fd int
	v4 bool
}

func openRaw(t *testing.T, ns *testenv.Namespace, addr netip.Addr, protocol int) *rawSocket {
	t.Helper()
	s := &rawSocket{v4: addr.Is4()}
	family := unix.AF_INET6
	if s.v4 {
		family = unix.AF_INET
	}
	err := ns.Do(func() (err error) {
		s.fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
		return err
	})
	if err != nil {
		t.Fatalf("open a raw socket of protocol %d in %s: %v", protocol, ns.Name, err)
	}
	t.Cleanup(func() { unix.Close(s.fd) })
	return s
}

func (s *rawSocket) sendTo(t *testing.T, to netip.Addr, payload string) {
	t.Helper()
	var sockaddr unix.Sockaddr = &unix.SockaddrInet6{Addr: to.As16()}
	if s.v4 {
		sockaddr = &unix.SockaddrInet4{Addr: to.As4()}
	}
	if err := unix.Sendto(s.fd, []byte(payload), 0, sockaddr); err != nil {
		t.Fatalf("send to %s: %v", to, err)
	}
}

// errSilence says that nothing came.
var errSilence = errors.New("nothing came")

// receive returns the next payload and its sender.
func (s *rawSocket) receive(wait time.Duration) (payload string, from netip.Addr, err error) {
	timeout := unix.NsecToTimeval(wait.Nanoseconds())
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return "", from, err
	}
	packet := make([]byte, 1<<16)
	length, sockaddr, err := unix.Recvfrom(s.fd, packet, 0)
	if errors.Is(err, unix.EAGAIN) {
		return "", from, errSilence
	}
	if err != nil {
		return "", from, os.NewSyscallError("recvfrom", err)
	}
	packet = packet[:length]
	switch a := sockaddr.(type) {
	case *unix.SockaddrInet4:
		const wordLength = 4
		return string(packet[wordLength*int(packet[0]&0xf):]), netip.AddrFrom4(a.Addr), nil // with the IP header
	case *unix.SockaddrInet6:
		return string(packet), netip.AddrFrom16(a.Addr), nil
	default:
		return "", from, fmt.Errorf("from %T", sockaddr)
	}
}

func (s *rawSocket) want(t *testing.T, payload string, from netip.Addr) {
	t.Helper()
	got, sender, err := s.receive(testenv.Timeout)
	if err != nil || got != payload || sender != from {
		t.Errorf("received %q from %s (%v), want %q from %s", got, sender, err, payload, from)
	}
}

// Protocols without ports are masqueraded by the address alone: each remote talks with one pod at
// a time, and another pod is refused until that one is gone.
func TestProtocolsWithoutPorts(t *testing.T) {
	const (
		experimental = 253 // RFC 3692
		gre          = 47
	)
	n := newNetwork(t)
	n.AddSecondUplink(t)
	inEachFamily(t, func(t *testing.T, f family) {
		for _, protocol := range []int{experimental, gre} {
			t.Run(fmt.Sprint(protocol), func(t *testing.T) {
				pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
				first, second := openRaw(t, pod.Namespace, f.node, protocol), openRaw(t, other.Namespace, f.node, protocol)
				outside := openRaw(t, n.Outside, f.node, protocol)
				elsewhere := openRaw(t, n.SecondOutside, f.node, protocol)

				first.sendTo(t, f.outside, "a question")
				outside.want(t, "a question", f.node)
				outside.sendTo(t, f.node, "an answer")
				first.want(t, "an answer", f.outside)

				refused := n.refusedFlows(t)
				second.sendTo(t, f.outside, "another's")
				testenv.Eventually(t, "the other pod to be refused", func() error {
					if n.refusedFlows(t) == refused {
						return errors.New("not counted")
					}
					return nil
				})
				second.sendTo(t, f.secondOutside, "elsewhere")
				elsewhere.want(t, "elsewhere", f.secondNode)
				elsewhere.sendTo(t, f.secondNode, "from elsewhere")
				second.want(t, "from elsewhere", f.secondOutside)

				first.sendTo(t, f.outside, "once more")
				outside.want(t, "once more", f.node)
				del(t, pod)
				second.sendTo(t, f.outside, "my turn")
				outside.want(t, "my turn", f.node)
				del(t, other)
			})
		}
	})
}
