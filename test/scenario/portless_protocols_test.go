package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
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
	err := ns.Do(func() (err error) {
		s.fd, err = unix.Socket(nl.GetIPFamily(addr.AsSlice()), unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
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

// errNothing is the error of a timeout.
var errNothing = errors.New("nothing received")

// receive returns the next payload and its sender.
func (s *rawSocket) receive(wait time.Duration) (payload string, from netip.Addr, err error) {
	timeout := unix.NsecToTimeval(wait.Nanoseconds())
	if err := unix.SetsockoptTimeval(s.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return "", from, err
	}
	packet := make([]byte, 1<<16)
	length, sockaddr, err := unix.Recvfrom(s.fd, packet, 0)
	for errors.Is(err, unix.EINTR) {
		length, sockaddr, err = unix.Recvfrom(s.fd, packet, 0)
	}
	if errors.Is(err, unix.EAGAIN) {
		return "", from, errNothing
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
		return "", from, fmt.Errorf("unexpected sender address %T", sockaddr)
	}
}

func (s *rawSocket) want(t *testing.T, payload string, from netip.Addr) {
	t.Helper()
	got, sender, err := s.receive(testenv.Timeout)
	if err != nil || got != payload || sender != from {
		t.Errorf("got %q from %s (%v), want %q from %s", got, sender, err, payload, from)
	}
}

// Protocols without ports are masqueraded by address alone: one pod at a time communicates with a remote, and
// other pods' packets are dropped until that one is deleted.
func TestProtocolsWithoutPorts(t *testing.T) {
	const (
		experimental = 253 // RFC 3692
		gre          = 47
	)
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "masqTunnels": true`))
	n.AddSecondUplink(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, protocol := range []int{experimental, gre} {
			t.Run(fmt.Sprint(protocol), func(t *testing.T) {
				pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
				first, second := openRaw(t, pod.Namespace, f.Node, protocol), openRaw(t, other.Namespace, f.Node, protocol)
				outside := openRaw(t, n.Outside, f.Node, protocol)
				elsewhere := openRaw(t, n.SecondOutside, f.Node, protocol)

				first.sendTo(t, f.Outside, "request")
				outside.want(t, "request", f.Node)
				outside.sendTo(t, f.Node, "reply")
				first.want(t, "reply", f.Outside)

				before := n.noPortDrops(t)
				second.sendTo(t, f.Outside, "from the other pod")
				testenv.Eventually(t, "a drop for the other pod", func() error {
					if n.noPortDrops(t) == before {
						return fmt.Errorf("got %d drops, want more", before)
					}
					return nil
				})
				second.sendTo(t, f.SecondOutside, "elsewhere")
				elsewhere.want(t, "elsewhere", f.SecondNode)
				elsewhere.sendTo(t, f.SecondNode, "from elsewhere")
				second.want(t, "from elsewhere", f.SecondOutside)

				first.sendTo(t, f.Outside, "still the first")
				outside.want(t, "still the first", f.Node)
				del(t, pod)
				second.sendTo(t, f.Outside, "now the second")
				outside.want(t, "now the second", f.Node)
				del(t, other)
			})
		}
	})
}
