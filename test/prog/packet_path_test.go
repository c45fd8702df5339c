package prog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// hop is one program on a connection's path.
type hop struct {
	program  string
	in       string // the packet before; "": the one of the hop before
	out      string // the packet afterwards; "*" is the masquerading port
	turn     bool   // the packet before is turned around: a reply
	redirect bool   // to another device, bypassing the stack
	routed   bool   // from_uplink has given the packet the tag of one without a flow
}

// TestPacketPaths follows connections through all programs on their path. The programs
// themselves make the state.
func TestPacketPaths(t *testing.T) {
	const (
		toLoopback    = bpf.ProgToLoopback
		fromContainer = bpf.ProgFromContainer
		fromUplink    = bpf.ProgFromUplink
		toUplink      = bpf.ProgToUplink
	)
	// A request, its reply, and another request.
	byGateway := func(first, pod, reply string) []hop {
		request := "podgw:* > " + pod
		return []hop{
			{program: first, out: request, redirect: true},
			{program: fromContainer, out: reply, turn: true, redirect: true},
			{program: first, out: request, turn: true, redirect: true},
		}
	}
	h := newHost(t)
	for _, tc := range []struct {
		name   string
		on     []proto
		routed bool // has such a hop
		ports  []hostPort
		in     string
		hops   []hop
	}{
		{
			name: "pod to outside", in: "pod:4000 > remote:80",
			hops: []hop{
				{program: fromContainer, out: "pod:4000 > remote:80"},
				{program: toUplink, out: "node:* > remote:80"},
				{program: fromUplink, out: "remote:80 > pod:4000", turn: true},
				{program: fromContainer, out: "pod:4000 > remote:80", turn: true},
				{program: toUplink, out: "node:* > remote:80"},
			},
		},
		{
			name: "outside to host port", on: withPorts, in: "remote:5000 > node:8080",
			ports: []hostPort{{host: "any:8080", to: "pod:80"}},
			hops: []hop{
				{program: fromUplink, out: "remote:5000 > pod:80"},
				{program: fromContainer, out: "pod:80 > remote:5000", turn: true},
				{program: toUplink, out: "node:8080 > remote:5000"},
				{program: fromUplink, out: "remote:5000 > pod:80", turn: true},
			},
		},
		{
			name: "outside to pod", routed: true, in: "remote:5000 > pod:80",
			hops: []hop{
				{program: fromUplink, out: "remote:5000 > pod:80"},
				{program: bpf.ProgToContainer, out: "remote:5000 > pod:80", routed: true},
				{program: fromContainer, out: "pod:80 > remote:5000", turn: true},
				{program: toUplink, out: "pod:80 > remote:5000"},
			},
		},
		{
			name: "pod to another pod's host port", on: withPorts, in: "pod:5000 > node:8080",
			ports: []hostPort{{host: "node:8080", to: "pod2:80"}},
			hops:  byGateway(fromContainer, "pod2:80", "node:8080 > pod:5000"),
		},
		{
			name: "pod to its own host port", on: withPorts, in: "pod:5000 > node:8080",
			ports: []hostPort{{host: "any:8080", to: "pod:80"}},
			hops:  byGateway(fromContainer, "pod:80", "node:8080 > pod:5000"),
		},
		{
			name: "host to host port", on: withPorts, in: "loopback:5000 > loopback:8080",
			ports: []hostPort{{host: "any:8080", to: "pod:80"}},
			hops:  byGateway(toLoopback, "pod:80", "loopback:8080 > loopback:5000"),
		},
		{
			name: "pod to pod", in: "pod:5000 > pod2:80",
			hops: []hop{
				{program: fromContainer, out: "pod:5000 > pod2:80"},
				{program: fromContainer, out: "pod2:80 > pod:5000", turn: true},
			},
		},
		{
			name: "pod to outside, without ports", on: withoutPorts, in: "pod:0 > remote:0",
			hops: []hop{
				{program: fromContainer, out: "pod:0 > remote:0"},
				{program: toUplink, out: "node:0 > remote:0"},
				{program: fromUplink, out: "remote:0 > pod:0", turn: true},
				{program: toUplink, out: "node:0 > remote:0", turn: true},
			},
		},
		{
			name: "pod to outside, SCTP", on: []proto{sctp}, in: "pod:4000 > remote:80",
			hops: []hop{
				{program: fromContainer, out: "pod:4000 > remote:80"},
				{program: toUplink, out: "node:4000 > remote:80"},
				{program: fromUplink, out: "remote:80 > pod:4000", turn: true},
				{program: toUplink, out: "node:4000 > remote:80", turn: true},
			},
		},
		{
			name: "outside to a pod without ipMasq that has a host port", routed: true, on: withPorts, in: "remote:5000 > plain:80",
			ports: []hostPort{{host: "any:8080", to: "plain:80"}},
			hops: []hop{
				{program: fromUplink, out: "remote:5000 > plain:80"},
				{program: bpf.ProgToContainer, out: "remote:5000 > plain:80", routed: true},
				{program: fromContainer, out: "plain:80 > remote:5000", turn: true},
				{program: toUplink, out: "plain:80 > remote:5000"},
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.routed {
				testenv.Require(t, ingressDevice)
			}
			eachScene(t, tc.on, func(t *testing.T, s scene) {
				testenv.Must(t, errors.Join(h.reset(), h.fill(s, tc.ports, nil)))
				packet, reply := s.packet(tc.in, false), false
				for i, hop := range tc.hops {
					if hop.turn {
						packet, reply = replyTo(packet), !reply
					}
					out, err := h.hop(&s, packet, reply, hop)
					if err != nil {
						t.Fatalf("hop %d, %s: %v", i, hop.program, err)
					}
					packet = out
				}
			})
		})
	}
}

// hop runs one program on a packet, and checks and returns the result.
func (h *host) hop(s *scene, packet testenv.Packet, reply bool, step hop) (testenv.Packet, error) {
	copy(packet.DstMAC[:], h.device(step.program).HardwareAddr)
	frame := packet.MustBuild()
	if step.routed {
		h.ingress, h.tag = uint32(h.uplink.Index), s.tag(packet)|tagPending
		defer func() { h.ingress, h.tag = 0, 0 }()
		if err := h.putRouted(*s, packet); err != nil {
			return packet, err
		}
	}
	verdict, result, err := h.runInside(step.program, frame)
	if err != nil {
		return packet, err
	}
	if err := checkVerdict(verdict, row{redirect: step.redirect}.verdict()); err != nil {
		return packet, err
	}
	known := s.star
	if err := checkPacket(s, row{out: step.out, reply: reply}, packet, frame, result); err != nil {
		return packet, err
	}
	if known != 0 && s.star != known {
		return packet, fmt.Errorf("port changed to %d from %d", s.star, known)
	}
	return testenv.Decode(result)
}

// replyTo returns the packet with which the receiver of p replies.
func replyTo(p testenv.Packet) testenv.Packet {
	p.SrcMAC, p.DstMAC = p.DstMAC, p.SrcMAC
	p.Src, p.Dst = p.Dst, p.Src
	p.SrcPort, p.DstPort = p.DstPort, p.SrcPort
	if p.TCPFlags != 0 {
		p.TCPFlags = testenv.ACK
	}
	switch {
	case p.Proto == unix.IPPROTO_SCTP:
		p.Payload = p.Payload[2:4] + p.Payload[:2] + p.Payload[4:]
		isData(&p)
	case p.Type == 0 && p.ID != 0, p.Type == 8: // echo
		p.Type ^= 8
	case p.Type == 128, p.Type == 129:
		p.Type ^= 1
	}
	return p
}

// TestHostPortRetargeted replaces the pod behind a host port in the middle of a connection,
// as a restart with a new address does.
func TestHostPortRetargeted(t *testing.T) {
	h := newHost(t)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		testenv.Must(t, h.reset())
		for _, pod := range []string{"pod", "pod2", "pod"} {
			err := errors.Join(
				empty[bpf.HostPortKey, bpf.HostPort](h.programs.Maps[bpf.MapHostPorts]),
				h.fill(s, []hostPort{{host: "any:8080", to: pod + ":80"}}, nil),
				h.pass(s, bpf.ProgFromUplink, "remote:5000 > node:8080", "remote:5000 > "+pod+":80", false),
				h.pass(s, bpf.ProgToUplink, pod+":80 > remote:5000", "node:8080 > remote:5000", true),
			)
			if err != nil {
				t.Errorf("%s: %v", pod, err)
			}
		}
	})
}

// pass wants a program to turn the packet in into want.
func (h *host) pass(s scene, program, in, want string, reply bool) error {
	_, err := h.hop(&s, s.packet(in, reply), reply, hop{program: program, out: want})
	return err
}

// transit is run for packets. Checksums must be valid afterwards.
func (h *host) transit(program string, p testenv.Packet) (testenv.Packet, uint32, error) {
	copy(p.DstMAC[:], h.device(program).HardwareAddr)
	verdict, result, err := h.run(program, p.MustBuild())
	if err != nil {
		return p, 0, err
	}
	if err := testenv.VerifyChecksums(result); err != nil {
		return p, 0, fmt.Errorf("%s: %w", p, err)
	}
	got, err := testenv.Decode(result)
	return got, verdict, err
}

// TestZeroUDPChecksum chooses payloads for which the translated UDP checksum is 0. It must be
// written as 0xffff, since 0 means none.
func TestZeroUDPChecksum(t *testing.T) {
	h := newHost(t)
	eachScene(t, []proto{udp}, func(t *testing.T, s scene) {
		r := row{in: outgoing, out: "node:* > remote:80", after: []flow{snat("remote:80", "node:*", "pod:4000")}}
		s.star = h.candidates(t, s, outgoing)[0]
		// In one's complement, a payload of the former checksum makes it 0.
		leaves := s.readdress(s.packet(outgoing, false), "node:* > remote:80", false)
		leaves.Payload = "\x00\x00"
		frame := leaves.MustBuild()
		checksum := binary.BigEndian.Uint16(frame[s.headerLen()+6:])
		payload := string(binary.BigEndian.AppendUint16(nil, checksum))
		r.edit = func(p *testenv.Packet) { p.Payload = payload }
		leaves.Payload = payload
		frame = leaves.MustBuild()
		if got := binary.BigEndian.Uint16(frame[s.headerLen()+6:]); got != 0xffff && got != 0 {
			t.Fatalf("the test's packet has the checksum %#04x", got)
		}
		testenv.NoError(t, h.check(bpf.ProgToUplink, s, r))
	})
}

// TestUDPTunnels has UDP to ports of tunnels, with and without a socket of the host there. (Other
// tunnels are among testenv's hostile and legal frames.)
func TestUDPTunnels(t *testing.T) {
	const other = 4788
	h := newHost(t)
	s := h.sender()
	ports := []uint16{4789, 4790, 8472, 6081, other}
	groups := map[string]string{"v4": "224.0.0.1", "v6": "ff02::1"}
	for _, f := range addressings {
		source := s.Addr4
		if f.name == "v6" {
			source = s.Addr6
		}
		packet := func(to string, port uint16, edit func(*testenv.Packet)) testenv.Frame {
			dst, err := netip.ParseAddr(to)
			if err != nil {
				dst = f.addr(to)
			}
			p := testenv.UDPPacket(netip.AddrPortFrom(source, 4000), netip.AddrPortFrom(dst, port), "\x08 and a frame")
			p.SrcMAC, p.DstMAC, p.TTL = s.MAC, s.HostMAC, 64
			edit(&p)
			return testenv.Frame{Name: fmt.Sprintf("%s port %d", dst, port), Bytes: p.MustBuild(), Reason: bpf.ReasonTunnel}
		}
		for edit, change := range map[string]func(*testenv.Packet){
			"plain":            func(*testenv.Packet) {},
			"a first fragment": func(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 99 },
		} {
			for _, sockets := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s, sockets %t", f.name, edit, sockets), func(t *testing.T) {
					if sockets {
						h.listenUDP(t, f, ports)
					}
					for to, own := range map[string]bool{"node": true, "node2": true, "podgw": true, groups[f.name]: true, "remote": false, "pod2": false} {
						for _, port := range ports {
							frame := packet(to, port, change)
							if err := h.judge(s, antiSpoof, frame, !sockets || !own || port == other); err != nil {
								t.Errorf("%s: %v", frame.Name, err)
							}
							if err := h.judge(s, 0, frame, true); err != nil {
								t.Errorf("antiSpoof off, %s: %v", frame.Name, err)
							}
						}
					}
				})
			}
		}
	}
}

// By default a pod takes over no tunnel or routing protocol of its node's. With masqTunnels it does.
func TestTunnelsAreNotMasqueraded(t *testing.T) {
	h := newHost(t)
	for _, number := range []uint8{
		unix.IPPROTO_IPIP, unix.IPPROTO_IPV6, unix.IPPROTO_RSVP, unix.IPPROTO_GRE, unix.IPPROTO_ESP, unix.IPPROTO_AH, 89, // OSPF
		unix.IPPROTO_PIM, 112, unix.IPPROTO_L2TP, unix.IPPROTO_MPLS, // 112: VRRP
	} {
		for pod, drop := range map[string]string{"pod3": "protocol", "pod": ""} {
			r := row{name: fmt.Sprintf("%d from %s", number, pod), on: []proto{gre}, in: pod + ":0 > remote:0", edit: protocol(number), drop: drop, anyFlows: true}
			if drop == "" {
				r.out = "node:0 > remote:0"
			}
			h.runRow(t, bpf.ProgToUplink, r)
		}
	}
}

// listenUDP opens sockets on any address of the host, as the kernel does for tunnels.
func (h *host) listenUDP(t *testing.T, f addressing, ports []uint16) {
	t.Helper()
	for _, port := range ports {
		var socket *net.UDPConn
		err := h.Do(func() (err error) {
			socket, err = net.ListenUDP("udp"+f.name[1:], &net.UDPAddr{Port: int(port)})
			return err
		})
		testenv.Must(t, err)
		t.Cleanup(func() { socket.Close() })
	}
}
