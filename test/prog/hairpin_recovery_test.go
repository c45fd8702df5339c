package prog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestHairpinRecovery loses flows of a hairpin connection: the pod's reply is dropped or the stack's, and the
// client's next packet gets the same port again.
func TestHairpinRecovery(t *testing.T) {
	h := newHost(t)
	for _, client := range []string{"loopback", "node", "pod", "pod2"} {
		target, program := client, bpf.ProgToLoopback
		if ownerOf(client+":") != 0 {
			target, program = "node", bpf.ProgFromContainer
		}
		request := client + ":5000 > " + target + ":8080"
		replyHop := hop{program: bpf.ProgFromContainer, out: target + ":8080 > " + client + ":5000", redirect: true}
		requestHop := hop{program: program, out: "podgw:* > pod:80", redirect: true}
		for name, lost := range map[string][]bpf.FlowKind{
			"DNAT flow": {bpf.FlowDNAT}, "SNAT flow": {bpf.FlowSNAT}, "both": {bpf.FlowDNAT, bpf.FlowSNAT},
		} {
			for _, s := range (row{on: withPorts}).scenes() {
				t.Run(client+" "+name+" "+s.name+" "+string(s.proto), func(t *testing.T) {
					testenv.Must(t, errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)))
					first, err := h.hop(&s, s.packet(request, false), false, requestHop)
					testenv.Must(t, err)
					testenv.Must(t, h.lose(lost...))
					verdict, _, err := h.runInside(bpf.ProgFromContainer, replyTo(first).MustBuild())
					want := row{drop: "no flow"}.verdict()
					if slices.Contains(lost, bpf.FlowSNAT) { // nobody's, so the stack's
						want = verdictNext
					}
					if err := errors.Join(err, checkVerdict(verdict, want)); err != nil {
						t.Error("the reply:", err)
					}
					next := s.packet(request, false)
					if s.proto == tcp {
						next.TCPFlags = testenv.ACK
					}
					second, err := h.hop(&s, next, false, requestHop) // checks the port
					if err != nil {
						t.Fatal("the client's next packet:", err)
					}
					if _, err := h.hop(&s, replyTo(second), true, replyHop); err != nil {
						t.Error("the next reply:", err)
					}
				})
			}
		}
	}
}

// lose removes all flows of the kinds.
func (h *host) lose(kinds ...bpf.FlowKind) error {
	all, err := h.flows().all()
	errs := []error{err}
	for key := range all {
		for _, kind := range kinds {
			if key.Kind == kind {
				errs = append(errs, h.flows().Delete(key))
			}
		}
	}
	return errors.Join(errs...)
}

// TestHairpinNoPort leaves no port of the gateway free for a client.
func TestHairpinNoPort(t *testing.T) {
	h := newHost(t)
	h.programs = loadOfSize(t, 1<<14)
	s := scene{addressing: v4, proto: tcp}
	testenv.Must(t, errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)))
	for port := uint16(masqFirst); port <= masqLast; port++ {
		s.star = port
		testenv.Must(t, h.fill(s, nil, []flow{snat("pod:80", "podgw:*", "pod2:1")}))
	}
	frame := s.packet("loopback:5000 > loopback:8080", false).MustBuild()
	verdict, _, err := h.runInside(bpf.ProgToLoopback, frame)
	testenv.NoError(t, errors.Join(err, checkVerdict(verdict, verdictDrop), h.checkCounters("no port", len(frame))))
}

// TestHostConnectionOnHostPort has connections of the host from a port that is also a host port:
// the replies are not forwarded to the pod.
func TestHostConnectionOnHostPort(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct{ program, local, remote string }{
		{bpf.ProgFromUplink, "node:8080", "remote:53"},
		{bpf.ProgFromUplinkL3, "node:8080", "remote:53"},
		{bpf.ProgToLoopback, "node:8080", "node2:53"},
		{bpf.ProgToLoopback, "loopback:8080", "loopback:53"},
		{bpf.ProgFromContainer, "podgw:8080", "pod:53"},
		{bpf.ProgFromContainer, "node:8080", "pod2:53"},
	} {
		r := row{ports: []hostPort{{host: "any:8080", to: "pod:80"}}, in: tc.remote + " > " + tc.local, reply: true}
		for _, s := range (row{on: withPorts}).scenes() {
			t.Run(tc.program+" "+r.in+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				local, remote := s.side(tc.local, true), s.side(tc.remote, true)
				if s.proto == tcp && tc.program == bpf.ProgToLoopback {
					defer h.listen(t, tcp, remote).Close() // else the host refuses the connection
				}
				socket, err := h.connectFrom(s.proto, local, remote)
				testenv.Must(t, err)
				defer socket.Close()
				testenv.NoError(t, h.check(tc.program, s, r))
			})
		}
	}
}

type descriptor int

func (d descriptor) Close() error { return unix.Close(int(d)) }

// connectFrom starts to connect, and does not wait for the result.
func (h *host) connectFrom(p proto, local, remote netip.AddrPort) (io.Closer, error) {
	kind := unix.SOCK_STREAM
	if p == udp {
		kind = unix.SOCK_DGRAM
	}
	family, sockaddr := unix.AF_INET, func(a netip.AddrPort) unix.Sockaddr {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	if local.Addr().Is6() {
		family, sockaddr = unix.AF_INET6, func(a netip.AddrPort) unix.Sockaddr {
			return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
		}
	}
	var fd int
	err := h.Do(func() (err error) {
		fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, sockaddr(local)))
	if errConnect := unix.Connect(fd, sockaddr(remote)); errConnect != nil && !errors.Is(errConnect, unix.EINPROGRESS) {
		err = errors.Join(err, errConnect)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect %s to %s: %w", local, remote, err), unix.Close(fd))
	}
	return descriptor(fd), nil
}

// TestHostServerInMasqRange has a server of the host on a port of the masquerading range, and a
// client in a pod, on the target port of a host port.
func TestHostServerInMasqRange(t *testing.T) {
	h := newHost(t)
	r := row{
		ports: []hostPort{{host: "any:8080", to: "pod:4000"}}, in: "pod:4000 > node:20000",
		edit: func(p *testenv.Packet) { p.TCPFlags = testenv.ACK },
	}
	eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout)
		defer cancel()
		server, err := h.Listen(ctx, netip.AddrPortFrom(s.addr("node"), 20000))
		testenv.Must(t, err)
		defer server.Close()
		testenv.NoError(t, h.check(bpf.ProgFromContainer, s, r))
	})
}
