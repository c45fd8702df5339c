package prog

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// cached makes entries for the connection between the pods in the forwarding cache: for its packets to be redirected,
// or to be left to the stack. Nothing else knows how to redirect it afterwards.
func (h *cacheHost) cached(s scene, redirect bool) error {
	path, verdict := bpf.FastPathNever, verdictOf(redirect)
	if redirect {
		path = bpf.FastPathEstablished
	}
	if err := h.start(s, path); err != nil {
		return err
	}
	if redirect {
		if err := h.offload(s, podToPod); err != nil {
			return err
		}
	}
	return errors.Join(
		h.wantSent(s, "pod", forth, verdict), h.wantSent(s, "pod2", back, verdict), h.removeOffloads(s),
	)
}

// removeOffloads removes the flows of kind FlowOffload.
func (h *host) removeOffloads(s scene) error {
	all, err := h.flows().offloads(s.number())
	for key := range all {
		err = errors.Join(err, h.flows().Delete(key))
	}
	return err
}

func bySYN(p *testenv.Packet) { p.TCPFlags = testenv.SYN }

const forth, back = "pod:4000 > pod2:80", "pod2:80 > pod:4000"

func eachCached(t *testing.T, fn func(t *testing.T, s scene, redirect bool)) {
	for _, s := range (row{on: withPorts}).scenes() {
		for _, redirect := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s %s redirect %v", s.name, s.proto, redirect), func(t *testing.T) { fn(t, s, redirect) })
		}
	}
}

func verdictOf(redirect bool) uint32 {
	if redirect {
		return verdictRedirect
	}
	return verdictNext
}

// Without CAP_NET_RAW or with it, a pod cannot send by another's entry: it is dropped as if there were none.
func TestForwardingCacheIsNotForOthers(t *testing.T) {
	h := newCacheHost(t)
	eachCached(t, func(t *testing.T, s scene, redirect bool) {
		for _, tc := range []struct {
			name, pod, text string
			mac             testenv.MAC
			drop            string
		}{
			{"another MAC address", "pod", forth, podMACs["pod2"], "MAC"},
			{"the same packet from another device", "pod2", forth, podMACs["pod2"], "address"},
			{"the same frame from another device", "pod2", forth, podMACs["pod"], "MAC"},
			{"another's address", "pod", back, podMACs["pod"], "address"},
			{"another's frame", "pod", back, podMACs["pod2"], "MAC"},
		} {
			t.Run(tc.name, func(t *testing.T) {
				err := h.on(0, func() error {
					return errors.Join(
						h.cached(s, redirect),
						h.wantSent(s, "pod", forth, verdictOf(redirect)),
						h.wantSent(s, tc.pod, tc.text, verdictDrop, func(p *testenv.Packet) { p.SrcMAC = tc.mac }),
						h.wantSent(s, "pod", forth, verdictOf(redirect)),
					)
				})
				frame := h.packet(s, tc.pod, tc.text).MustBuild()
				testenv.NoError(t, errors.Join(err, h.checkCounters(tc.drop, len(frame))))
			})
		}
	})
}

// What the plugin changes holds for the next packet.
func TestForwardingCacheEndsWithTheGeneration(t *testing.T) {
	h := newCacheHost(t)
	endpoints := h.programs.Maps[bpf.MapEndpoints]
	for _, tc := range []struct {
		name   string
		change func(s scene) error
		drop   bool // else the packet goes to the stack
	}{
		{"nothing", func(scene) error { return nil }, false},
		{"the sender's endpoint is removed", func(s scene) error { return endpoints.Delete(s.wire("pod")) }, false},
		{"the receiver's endpoint is removed", func(s scene) error { return endpoints.Delete(s.wire("pod2")) }, false},
		{"the sender has another MAC address", func(s scene) error {
			return h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Mac[5]++ })
		}, true},
		{"another container has the sender's address", func(s scene) error {
			return errors.Join(
				h.putPod(s, "pod", bpf.FastPathEstablished, func(e *bpf.Endpoint) { e.Container++; e.Ifindex = uint32(h.devices["pod2"].Index) }),
				h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Addr4, d.Addr6 = bpf.Addr{}, bpf.Addr{} }),
			)
		}, true},
		{"the sender's routes are its own", func(s scene) error {
			return h.putPodDevice(s, "pod", func(d *bpf.Device) { d.RouteSet = 1 })
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			eachCached(t, func(t *testing.T, s scene, redirect bool) {
				verdict := uint32(verdictNext)
				if tc.drop {
					verdict = verdictDrop
				}
				err := h.on(0, func() error {
					return errors.Join(
						h.cached(s, redirect), tc.change(s),
						h.wantSent(s, "pod", forth, verdictOf(redirect)), // by the entry, without a new generation
						h.emptyForwardingCache(),
						h.wantSent(s, "pod", forth, verdict),
					)
				})
				testenv.NoError(t, err)
			})
		})
	}
}

// A policy of the sender, from now on, tracks what it sends before an entry is made again.
func TestForwardingCacheTracksForPolicy(t *testing.T) {
	h := newCacheHost(t)
	eachCached(t, func(t *testing.T, s scene, redirect bool) {
		if s.proto == tcp {
			return // without its SYN, a TCP connection is not tracked
		}
		err := h.on(0, func() error {
			err := errors.Join(
				h.cached(s, redirect), h.putPodDevice(s, "pod", func(d *bpf.Device) { d.Policy = podPolicy }), h.putPolicy(isolated, nil),
				h.emptyForwardingCache(),
			)
			if redirect {
				err = errors.Join(err, h.offload(s, podToPod))
			}
			return errors.Join(err, h.wantSent(s, "pod", forth, verdictOf(redirect)), h.wantSent(s, "pod", forth, verdictOf(redirect)))
		})
		pairs, errPairs := h.flows().ofKind(func(kind bpf.FlowKind) bool { return kind == bpf.FlowPair })
		opened := 0
		for _, pair := range pairs {
			if pair.Payer == owners["pod"] {
				opened++
			}
		}
		if err = errors.Join(err, errPairs); err != nil || opened != 1 {
			t.Errorf("flows of both pods: %+v, %v; want one, opened by the first", pairs, err)
		}
	})
}

// Packets that need more than forwarding go to the stack, though their connection has an entry.
func TestForwardingCacheLeavesToTheStack(t *testing.T) {
	h := newCacheHost(t)
	long := strings.Repeat("x", podMTU)
	eachCached(t, func(t *testing.T, s scene, redirect bool) {
		if !redirect {
			return
		}
		for _, tc := range []struct {
			name string
			only proto
			v4   bool
			edit func(*testenv.Packet)
			void bool // the connection begins anew
		}{
			{name: "a first fragment", edit: func(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 7 }},
			{name: "IP options", v4: true, edit: func(p *testenv.Packet) { p.Options, p.Payload = "\x01\x01\x01\x01", p.Payload[4:] }},
			{name: "TTL 1", edit: func(p *testenv.Packet) { p.TTL = 1 }},
			{name: "longer than the receiver's MTU", edit: func(p *testenv.Packet) { p.Payload = long }, void: true},
			{name: "a frame for another host", edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1})},
			{name: "SYN", only: tcp, edit: bySYN, void: true},
			{name: "FIN", only: tcp, edit: func(p *testenv.Packet) { p.TCPFlags = testenv.FIN | testenv.ACK }},
			{name: "RST", only: tcp, edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST }},
		} {
			if tc.v4 && s.name != "v4" || tc.only != "" && tc.only != s.proto {
				continue
			}
			t.Run(tc.name, func(t *testing.T) {
				err := h.on(0, func() error {
					if err := errors.Join(h.cached(s, true), h.wantSent(s, "pod", forth, verdictRedirect)); err != nil {
						return err
					}
					p := h.packet(s, "pod", forth)
					tc.edit(&p)
					got, err := h.tags.run(h.devices["pod"], p.MustBuild())
					if err == nil && !bytes.Equal(got.frame, p.MustBuild()) {
						err = fmt.Errorf("packet became %x", got.frame)
					}
					return errors.Join(err, checkVerdict(got.verdict, verdictNext), h.wantSent(s, "pod", forth, verdictOf(!tc.void)))
				})
				testenv.NoError(t, err)
			})
		}
	})
}

// A listener of the host's decides about each packet to a tunnel's port: no entry stands for that.
func TestForwardingCacheIsNotForTunnels(t *testing.T) {
	h := newCacheHost(t)
	for _, f := range addressings {
		s := scene{addressing: f, proto: udp}
		for _, port := range []uint16{4789, 4790, 6081, 8472} {
			t.Run(fmt.Sprintf("%s %d", f.name, port), func(t *testing.T) {
				text := fmt.Sprintf("pod:4000 > node:%d", port)
				err := h.on(0, func() error {
					err := errors.Join(
						h.start(s, bpf.FastPathNever),
						h.wantSent(s, "pod", text, verdictNext), h.wantSent(s, "pod", text, verdictNext),
					)
					listener, listenErr := listenUDP(port)
					if listenErr != nil {
						return listenErr
					}
					defer unix.Close(listener)
					return errors.Join(err, h.wantSent(s, "pod", text, verdictDrop))
				})
				testenv.NoError(t, err)
			})
		}
	}
}

// listenUDP opens a socket for both families.
func listenUDP(port uint16) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet6{Port: int(port)}); err != nil {
		unix.Close(fd)
		return 0, fmt.Errorf("bind port %d: %w", port, err)
	}
	return fd, nil
}

// A connection by an uplink is counted, but each of its packets is translated anew.
func TestForwardingCacheCountsOnlyAtUplinks(t *testing.T) {
	h := newCacheHost(t)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		s.star = 20000
		known := snat("remote:80", "node:*", "pod:4000").established()
		receive := func(out string) error {
			p := s.packet("remote:80 > node:*", true)
			if s.proto == tcp {
				p.TCPFlags = testenv.ACK
			}
			step := hop{program: bpf.ProgFromUplink, out: out}
			return h.receive(s, p, step)
		}
		err := h.on(0, func() error {
			err := errors.Join(h.start(s, bpf.FastPathNever), h.fill(s, nil, []flow{known}))
			for range 5 {
				err = errors.Join(err, receive("remote:80 > pod:4000"))
			}
			key, _ := known.wire(s)
			return errors.Join(err, h.flows().Delete(key), receive(""))
		})
		testenv.NoError(t, err)
	})
}

// receive runs from_uplink on a packet, and wants it in the stack as step says.
func (h *cacheHost) receive(s scene, p testenv.Packet, step hop) error {
	copy(p.DstMAC[:], h.uplink.HardwareAddr)
	frame := p.MustBuild()
	verdict, result, err := h.run(step.program, frame)
	return errors.Join(err, checkVerdict(verdict, verdictNext), checkPacket(&s, row{out: step.out, reply: true}, p, frame, result))
}

// A remote's packets that go through the stack are translated like the last one, as long as the flow is there.
func TestForwardingCacheNeedsTheFlow(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		ports   []hostPort
		flow    flow
		in, out string
	}{
		{flow: snat("remote:80", "node:20000", "pod:4000"), in: "remote:80 > node:20000", out: "remote:80 > pod:4000"},
		{
			ports: []hostPort{{host: "node:8080", to: "pod:80"}}, flow: dnat("remote:4000", "pod:80", "node:8080"),
			in: "remote:4000 > node:8080", out: "remote:4000 > pod:80",
		},
	} {
		t.Run(tc.in, func(t *testing.T) {
			eachScene(t, withPorts, func(t *testing.T, s scene) {
				key, _ := tc.flow.wire(s)
				passes := func(out string) error {
					p := s.packet(tc.in, false)
					p.TCPFlags = testenv.ACK
					got, _, err := h.transit(bpf.ProgFromUplink, p)
					if want := s.readdress(p, out, false); err == nil && (got.Dst != want.Dst || got.DstPort != want.DstPort) {
						err = fmt.Errorf("%s became %s, want %s", p, got, want)
					}
					return err
				}
				withdraw := func() error {
					err := h.programs.Maps[bpf.MapEndpoints].Delete(s.wire("pod"))
					for _, port := range tc.ports {
						key, _ := port.wire(s)
						err = errors.Join(err, h.programs.Maps[bpf.MapHostPorts].Delete(&key))
					}
					return err
				}
				err := h.on(0, func() error {
					return errors.Join(
						h.reset(), h.emptyForwardingCache(), h.fill(s, tc.ports, []flow{tc.flow.established()}), passes(tc.out),
						withdraw(), passes(tc.out), // by the entry, without a new generation
						h.flows().Delete(key), h.fill(s, nil, []flow{tc.flow.established().ownedBy(formerOwner)}), passes(tc.in),
						h.flows().Delete(key), passes(tc.in),
					)
				})
				testenv.NoError(t, err)
			})
		})
	}
}

// A container's replies through the stack get the source that the client used, also when the client's next connection on the
// same port uses another one.
func TestForwardingCacheGivesTheFlowsSource(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		first, next := dnat("remote:4000", "pod:80", "node:8080"), dnat("remote:4000", "pod:80", "node:8081")
		leaves := func(out string) error {
			sent, err := h.send(s, "pod", "pod:80 > remote:4000")
			if err != nil {
				return err
			}
			verdict, frame, err := h.runAt(bpf.ProgToUplink, h.veth, h.devices["pod"], sent)
			got, decodeErr := testenv.Decode(frame)
			if err = errors.Join(err, decodeErr, checkVerdict(verdict, verdictNext)); err != nil {
				return err
			}
			if want := s.readdress(got, out, false); got.Src != want.Src || got.SrcPort != want.SrcPort {
				return fmt.Errorf("a reply has the source %s:%d, want %s", got.Src, got.SrcPort, out)
			}
			return nil
		}
		err := h.on(0, func() error {
			return errors.Join(
				h.start(s, bpf.FastPathNever), h.fill(s, nil, []flow{first.established()}),
				leaves("node:8080 > remote:4000"), leaves("node:8080 > remote:4000"),
				h.fill(s, nil, []flow{next.established()}), leaves("node:8081 > remote:4000"),
			)
		})
		testenv.NoError(t, err)
	})
}
