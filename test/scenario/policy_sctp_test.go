package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var sctp = testenv.Feature{Name: "SCTP", Module: "sctp", Probe: func() error {
	fd, err := newSCTP(unix.AF_INET)
	if err == nil {
		unix.Close(fd)
	}
	return err
}}

var sctpRows = []policyRow{
	{"one port", `"policy": {"ingress": [{"from": [{"sameNetwork": true}], "ports": [{"protocol": "sctp", "port": 80}]}],
		"egress": [{"to": [{"network": "second"}, {"cidr": "192.0.2.2/32"}, {"cidr": "2001:db8:1::2/128"}], "ports": [{"protocol": "sctp", "port": 80}]}]}`,
		"a:sctp80 node*", "s:sctp80 out:sctp80 node*"},
	{"other protocols", `"policy": {"ingress": [{"ports": [{"port": 80}]}], "egress": [{"ports": [{"protocol": "udp", "port": 80}]}]}`, "node*", "node*"},
}

// TestPolicySCTP has real sockets of SCTP.
func TestPolicySCTP(t *testing.T) {
	testenv.Require(t, sctp)
	for _, path := range []string{"established", "always"} {
		t.Run(path, func(t *testing.T) {
			keys := `"ipMasq": true, "fastPath": "` + path + `"`
			n := newNetworkWith(t, withKeys(keys))
			peers := n.policyPeers(t)
			for i, row := range sctpRows {
				pod := n.addWith(t, fmt.Sprint("pod", i), keys+`, `+row.keys, nil)
				for _, f := range testenv.Families {
					for _, peer := range append(peers(f), policyPeer{ns: pod.Namespace, addr: f.Pod(pod)}) {
						for _, port := range []uint16{80, 85} {
							serveSCTP(t, peer.ns, at(peer.addr, port))
						}
					}
					t.Run(row.name+"/"+f.Name, func(t *testing.T) { n.wantRow(t, f, row, pod, peers(f), "sctp80", "sctp85") })
				}
			}
		})
	}
}

func newSCTP(family int) (fd int, err error) {
	return unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_SCTP)
}

// socketSCTP returns a socket of SCTP, which is bound or connects.
func socketSCTP(ns *testenv.Namespace, addr netip.AddrPort, use func(int, unix.Sockaddr) error) (file *os.File, err error) {
	family, to := sockaddrOf(addr)
	err = ns.Do(func() error {
		fd, err := newSCTP(family)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), "sctp")
		if err := use(fd, to); !errors.Is(err, unix.EINPROGRESS) {
			return err
		}
		return nil
	})
	return file, err
}

// serveSCTP answers each message with the name of the namespace, until the test ends.
func serveSCTP(t *testing.T, ns *testenv.Namespace, addr netip.AddrPort) {
	t.Helper()
	listener, err := socketSCTP(ns, addr, func(fd int, to unix.Sockaddr) error {
		return errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, to), unix.Listen(fd, 16))
	})
	if errors.Is(err, unix.EADDRINUSE) { // by an earlier call
		return
	}
	testenv.Must(t, err)
	t.Cleanup(func() { listener.Close() })
	raw, err := listener.SyscallConn()
	testenv.Must(t, err)
	go func() {
		for {
			fd := -1
			if err := raw.Read(func(listening uintptr) bool {
				fd, _, err = unix.Accept4(int(listening), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
				return !errors.Is(err, unix.EAGAIN)
			}); err != nil || fd < 0 {
				return
			}
			go func(conn *os.File) {
				defer conn.Close()
				for message := make([]byte, 64); ; {
					if _, err := conn.Read(message); err != nil {
						return
					}
					if _, err := conn.WriteString(ns.Name); err != nil {
						return
					}
				}
			}(os.NewFile(uintptr(fd), "sctp"))
		}
	}()
}

// askSCTP connects, and sends messages.
func askSCTP(ctx context.Context, from, server *testenv.Namespace, to netip.AddrPort) error {
	conn, err := socketSCTP(from, to, unix.Connect)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })()
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	refused := 0
	err = raw.Write(func(fd uintptr) bool { // until it is connected
		refused, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		ready, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0)
		return refused != 0 || ready > 0
	})
	if err == nil && refused != 0 {
		err = unix.Errno(refused)
	}
	if err != nil {
		return err
	}
	for range 12 {
		if _, err := conn.WriteString("hello"); err != nil {
			return err
		}
		reply := make([]byte, 64)
		n, err := conn.Read(reply)
		if err == nil && string(reply[:n]) != server.Name {
			err = errors.New("reply from " + string(reply[:n]))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
