package prog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestHereHeals loses entries of a connection from here: the answer is held back,
// and the client's next packet gets the same port again.
func TestHereHeals(t *testing.T) {
	const flowIn, flowOut = bpf.FlowDNAT, bpf.FlowSNAT
	h := newHost(t)
	for _, client := range []string{"loopback", "node", "pod", "pod2"} {
		asked, program := client, bpf.ProgToLoopback
		if ownerOf(client+":") != 0 {
			asked, program = "node", bpf.ProgFromContainer
		}
		asks := client + ":5000 > " + asked + ":8080"
		answered := hop{program: bpf.ProgFromContainer, out: asked + ":8080 > " + client + ":5000", redirect: true}
		asking := hop{program: program, out: "podgw:* > pod:80", redirect: true}
		for name, lost := range map[string][]bpf.FlowKind{
			"what was asked for": {flowIn}, "who has asked": {flowOut}, "both": {flowIn, flowOut},
		} {
			for _, s := range (row{on: ported}).scenes() {
				t.Run(client+" "+name+" "+s.name+" "+string(s.proto), func(t *testing.T) {
					if err := errors.Join(h.reset(), h.fill(s, []port{{host: "any:8080", to: "pod:80"}}, nil)); err != nil {
						t.Fatal(err)
					}
					first, err := h.hop(&s, s.packet(asks, false), false, asking)
					if err != nil {
						t.Fatal(err)
					}
					if err := h.lose(lost...); err != nil {
						t.Fatal(err)
					}
					verdict, _, err := h.runInside(bpf.ProgFromContainer, answer(first).MustBuild())
					want := row{drop: "no flow"}.verdict()
					if s.proto == udp && len(lost)+int(lost[0]) != 1+int(flowIn) { // who has asked is lost
						want = verdictNext
					}
					if err := errors.Join(err, checkVerdict(verdict, want)); err != nil {
						t.Error("the answer:", err)
					}
					next := s.packet(asks, false)
					if s.proto == tcp {
						next.TCPFlags = testenv.ACK
					}
					second, err := h.hop(&s, next, false, asking) // checks the port
					if err != nil {
						t.Fatal("the client goes on:", err)
					}
					if _, err := h.hop(&s, answer(second), true, answered); err != nil {
						t.Error("the next answer:", err)
					}
				})
			}
		}
	}
}

// lose removes all flows of these kinds.
func (h *host) lose(kinds ...bpf.FlowKind) error {
	all, err := contents[bpf.FlowKey, bpf.Flow](h.flows())
	errs := []error{err}
	for key := range all {
		for _, kind := range kinds {
			if key.Kind == kind {
				errs = append(errs, h.flows().Delete(&key))
			}
		}
	}
	return errors.Join(errs...)
}

// TestHereHasNoPort leaves no port of the gateway for another client.
func TestHereHasNoPort(t *testing.T) {
	h := newHost(t)
	s := scene{family: v4, proto: tcp}
	if err := errors.Join(h.reset(), h.fill(s, []port{{host: "any:8080", to: "pod:80"}}, nil)); err != nil {
		t.Fatal(err)
	}
	for port := uint16(masqFirst); port <= masqLast; port++ {
		s.star = port
		if err := h.fill(s, nil, []flow{out("pod:80", "podgw:*", "pod2:1")}); err != nil {
			t.Fatal(err)
		}
	}
	frame := s.packet("loopback:5000 > loopback:8080", false).MustBuild()
	verdict, _, err := h.runInside(bpf.ProgToLoopback, frame)
	if err := errors.Join(err, checkVerdict(verdict, verdictDrop), h.checkCounters("no port", len(frame))); err != nil {
		t.Error(err)
	}
}

// TestHostsOwnConnections has connections of the host's whose port is the number
// of a host port as well: their answers are not for the container.
func TestHostsOwnConnections(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct{ program, local, remote string }{
		{bpf.ProgFromUplink, "node:8080", "remote:53"},
		{bpf.ProgFromUplinkL3, "node:8080", "remote:53"},
		{bpf.ProgToLoopback, "node:8080", "node2:53"},
		{bpf.ProgToLoopback, "loopback:8080", "loopback:53"},
		{bpf.ProgFromContainer, "podgw:8080", "pod:53"},
		{bpf.ProgFromContainer, "node:8080", "pod2:53"},
	} {
		r := row{ports: []port{{host: "any:8080", to: "pod:80"}}, in: tc.remote + " > " + tc.local, reply: true}
		for _, s := range (row{on: ported}).scenes() {
			t.Run(tc.program+" "+r.in+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				local, remote := s.side(tc.local, true), s.side(tc.remote, true)
				if s.proto == tcp && tc.program == bpf.ProgToLoopback {
					defer h.listen(t, tcp, remote).Close() // else it is refused at once
				}
				socket, err := h.connectFrom(s.proto, local, remote)
				if err != nil {
					t.Fatal(err)
				}
				defer socket.Close()
				if err := h.check(tc.program, s, r); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

type descriptor int

func (d descriptor) Close() error { return unix.Close(int(d)) }

// connectFrom begins a connection, and does not wait for it.
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
	if connectErr := unix.Connect(fd, sockaddr(remote)); connectErr != nil && !errors.Is(connectErr, unix.EINPROGRESS) {
		err = errors.Join(err, connectErr)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("connect %s to %s: %w", local, remote, err), unix.Close(fd))
	}
	return descriptor(fd), nil
}

// TestHostsOwnServer has a server of the host, of a number that masquerading
// could choose, and a client in a pod, whose port is one that a host port leads to.
func TestHostsOwnServer(t *testing.T) {
	h := newHost(t)
	r := row{
		ports: []port{{host: "any:8080", to: "pod:4000"}}, in: "pod:4000 > node:20000",
		edit: func(p *testenv.Packet) { p.TCPFlags = testenv.ACK },
	}
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout)
			defer cancel()
			server, err := h.Listen(ctx, netip.AddrPortFrom(s.addr("node"), 20000))
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			if err := h.check(bpf.ProgFromContainer, s, r); err != nil {
				t.Error(err)
			}
		})
	}
}
