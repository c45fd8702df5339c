package prog

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// hop is one program on the way of a connection. It gets the packet that the hop
// before made, or, after a turn, its answer.
type hop struct {
	program string
	out     string // what leaves; "*" is the masquerading port
	turn    bool   // the receiver answers before this hop
}

// TestChains follows connections through all programs that they meet, with the
// state that the programs themselves make.
func TestChains(t *testing.T) {
	const (
		fromContainer = bpf.DatapathProgFromContainer
		toContainer   = bpf.DatapathProgToContainer
		fromUplink    = bpf.DatapathProgFromUplink
		toUplink      = bpf.DatapathProgToUplink
	)
	h := newHost(t)
	for _, tc := range []struct {
		name  string
		on    []proto
		ports []port
		in    string
		hops  []hop
	}{
		{
			name: "a pod asks the outside", in: "pod:4000 > remote:80",
			hops: []hop{
				{program: fromContainer, out: "pod:4000 > remote:80"},
				{program: toUplink, out: "node:* > remote:80"},
				{program: fromUplink, out: "remote:80 > pod:4000", turn: true},
				{program: toContainer, out: "remote:80 > pod:4000"},
				{program: fromContainer, out: "pod:4000 > remote:80", turn: true},
				{program: toUplink, out: "node:* > remote:80"},
			},
		},
		{
			name: "the outside asks a host port", on: ported, in: "remote:5000 > node:8080",
			ports: []port{{host: "any:8080", to: "pod:80"}},
			hops: []hop{
				{program: fromUplink, out: "remote:5000 > pod:80"},
				{program: toContainer, out: "remote:5000 > pod:80"},
				{program: fromContainer, out: "pod:80 > remote:5000", turn: true},
				{program: toUplink, out: "node:8080 > remote:5000"},
				{program: fromUplink, out: "remote:5000 > pod:80", turn: true},
			},
		},
		{
			name: "the outside asks a pod", in: "remote:5000 > pod:80",
			hops: []hop{
				{program: fromUplink, out: "remote:5000 > pod:80"},
				{program: toContainer, out: "remote:5000 > pod:80"},
				{program: fromContainer, out: "pod:80 > remote:5000", turn: true},
				{program: toUplink, out: "pod:80 > remote:5000"},
			},
		},
		{
			name: "a pod asks another pod's host port", on: ported, in: "pod:5000 > node:8080",
			ports: []port{{host: "node:8080", to: "pod2:80"}},
			hops: []hop{
				{program: fromContainer, out: "pod:5000 > pod2:80"},
				{program: toContainer, out: "pod:5000 > pod2:80"},
				{program: fromContainer, out: "pod2:80 > pod:5000", turn: true},
				{program: toContainer, out: "node:8080 > pod:5000"},
				{program: fromContainer, out: "pod:5000 > pod2:80", turn: true},
			},
		},
		{
			name: "a pod asks another pod", in: "pod:5000 > pod2:80",
			hops: []hop{
				{program: fromContainer, out: "pod:5000 > pod2:80"},
				{program: toContainer, out: "pod:5000 > pod2:80"},
				{program: fromContainer, out: "pod2:80 > pod:5000", turn: true},
				{program: toContainer, out: "pod2:80 > pod:5000"},
			},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, s := range (row{on: tc.on}).scenes() {
				t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
					if err := errors.Join(h.reset(), h.fill(s, tc.ports, nil)); err != nil {
						t.Fatal(err)
					}
					packet, reply := s.packet(tc.in, false), false
					for i, hop := range tc.hops {
						if hop.turn {
							packet, reply = answer(packet), !reply
						}
						out, err := h.hop(&s, packet, reply, hop)
						if err != nil {
							t.Fatalf("hop %d, %s: %v", i, hop.program, err)
						}
						packet = out
					}
				})
			}
		})
	}
}

// hop sends a packet through one program and checks what comes out.
func (h *host) hop(s *scene, packet testenv.Packet, reply bool, step hop) (testenv.Packet, error) {
	copy(packet.DstMAC[:], h.device(step.program).HardwareAddr)
	frame := packet.MustBuild()
	verdict, result, err := h.runInside(step.program, frame)
	if err != nil {
		return packet, err
	}
	if err := checkVerdict(verdict, false); err != nil {
		return packet, err
	}
	known := s.star
	if err := checkPacket(s, row{out: step.out, reply: reply}, packet, frame, result); err != nil {
		return packet, err
	}
	if known != 0 && s.star != known {
		return packet, fmt.Errorf("port is %d now, was %d", s.star, known)
	}
	return testenv.Decode(result)
}

// answer is what the receiver of p sends back.
func answer(p testenv.Packet) testenv.Packet {
	p.SrcMAC, p.DstMAC = p.DstMAC, p.SrcMAC
	p.Src, p.Dst = p.Dst, p.Src
	p.SrcPort, p.DstPort = p.DstPort, p.SrcPort
	if p.TCPFlags != 0 {
		p.TCPFlags = testenv.ACK
	}
	switch {
	case p.Type == 0 && p.ID != 0, p.Type == 8: // echo
		p.Type ^= 8
	case p.Type == 128, p.Type == 129:
		p.Type ^= 1
	}
	return p
}

// TestPortLeadsElsewhere re-creates the pod behind a host port in the middle of
// a connection, as `docker restart` does with a new address.
func TestPortLeadsElsewhere(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: ported}).scenes() {
		t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
			if err := h.reset(); err != nil {
				t.Fatal(err)
			}
			for _, pod := range []string{"pod", "pod2", "pod"} {
				err := errors.Join(
					h.fill(s, []port{{host: "any:8080", to: pod + ":80"}}, nil),
					h.pass(s, bpf.DatapathProgFromUplink, "remote:5000 > node:8080", "remote:5000 > "+pod+":80"),
					h.pass(s, bpf.DatapathProgToUplink, pod+":80 > remote:5000", "node:8080 > remote:5000"),
				)
				if err != nil {
					t.Errorf("%s: %v", pod, err)
				}
			}
		})
	}
}

// pass wants a program to make want of the packet in.
func (h *host) pass(s scene, program, in, want string) error {
	_, err := h.hop(&s, s.packet(in, false), false, hop{program: program, out: want})
	return err
}

// TestTruncated cuts packets at every length: none is changed that is not whole
// to the end of its transport header, and none upsets a program.
func TestTruncated(t *testing.T) {
	h := newHost(t)
	entries := []flow{
		out("remote:80", "node:20000", "pod:4000"), in("remote:5000", "pod:80", "node:8080"), in("pod:5000", "pod2:80", "node:8080"),
	}
	for _, s := range (row{}).scenes() {
		t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
			for _, tc := range []struct{ program, in string }{
				{bpf.DatapathProgToUplink, "pod:4000 > remote:80"},
				{bpf.DatapathProgToUplink, "pod:80 > remote:5000"},
				{bpf.DatapathProgFromUplink, "remote:80 > node:20000"},
				{bpf.DatapathProgFromUplink, "remote:5000 > node:8080"},
				{bpf.DatapathProgFromContainer, "pod:5000 > node:8080"},
				{bpf.DatapathProgToContainer, "pod2:80 > pod:5000"},
			} {
				if err := errors.Join(h.reset(), h.fill(s, []port{{host: "any:8080", to: "pod2:80"}}, entries)); err != nil {
					t.Fatal(err)
				}
				packet := s.packet(tc.in, false)
				copy(packet.DstMAC[:], h.device(tc.program).HardwareAddr)
				frame := packet.MustBuild()
				whole := s.headerLen() + map[proto]int{tcp: 20, udp: 8, echo: 8}[s.proto]
				err := h.Do(func() error {
					for length := range whole {
						if err := h.runCut(tc.program, s, frame[:length]); err != nil {
							t.Errorf("%s, %s, %d bytes: %v", tc.program, tc.in, length, err)
						}
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func (h *host) runCut(program string, s scene, frame []byte) error {
	verdict, result, err := h.run(program, frame)
	if err != nil {
		if len(frame) < s.headerLen() {
			return nil // Some kernels do not take less than an IP header.
		}
		return err
	}
	// Only what would be masqueraded is dropped, when it is known to be a pod's.
	drop := program == bpf.DatapathProgToUplink && len(frame) >= s.headerLen()
	if err := checkVerdict(verdict, drop); err != nil {
		return err
	}
	if !slices.Equal(result, frame) {
		return errors.New("changed")
	}
	return nil
}
