package prog

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// errorRow is an ICMP error through a program. It runs for every kind of error,
// and for packets quoted in full and truncated.
//
// The expected error is not computed from the one sent: it is built anew, about the
// packet that out names, and must be equal to the last byte.
type errorRow struct {
	name string
	on   []proto // of the packet that the error is about
	only string

	// The maps before. The flows must not change.
	ports  []hostPort
	flows  []flow
	device string // the pod behind the veth; "": unknown

	from  string // the error's sender
	to    string // its receiver; "": the source of the quoted packet
	about string // the quoted packet
	reply bool   // the quoted packet is a reply
	edit  func(p *testenv.Packet)
	kinds map[string][]errorKind // nil: all

	out      string // the quoted packet afterwards; "": the error is unchanged
	sender   string // the error's sender afterwards; "": as before
	redirect bool
	drop     string
}

// errorKind is the type, code and second word of an error.
type errorKind struct {
	typ, code uint8
	rest      uint32
}

var (
	errorKinds = map[string][]errorKind{
		"v4": {{3, 1, 0}, {3, 3, 0}, {3, 4, 1400}, {11, 0, 0}, {12, 0, 9 << 24}},
		"v6": {{1, 4, 0}, {2, 0, 1280}, {3, 0, 0}, {4, 1, 40}},
	}
	// Of these, a too small MTU, and the others.
	tooBig = map[string][]errorKind{"v4": {{3, 4, 1400}}, "v6": {{2, 0, 1280}}}
	others = map[string][]errorKind{
		"v4": {{3, 1, 0}, {3, 3, 0}, {11, 0, 0}, {12, 0, 9 << 24}},
		"v6": {{1, 4, 0}, {3, 0, 0}, {4, 1, 40}},
	}
)

// quotes are the lengths quoted of a packet behind its IP header. 18 bytes of TCP end with
// the checksum.
var quotes = []int{8, 9, 16, 18, 20, 1 << 16}

func runErrors(t *testing.T, program string, rows []errorRow) {
	h := newHost(t)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			for _, s := range (row{on: r.on, only: r.only}).scenes() {
				t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
					kinds := r.kinds
					if kinds == nil {
						kinds = errorKinds
					}
					for _, kind := range kinds[s.name] {
						for _, quote := range quotes {
							if err := h.checkError(program, s, r, kind, quote); err != nil {
								t.Errorf("%+v, %d bytes: %v", kind, quote, err)
							}
						}
					}
				})
			}
		})
	}
}

// buildError makes an error that quotes the packet text.
func (r errorRow) buildError(s scene, from, text string, kind errorKind, quote int) (testenv.Packet, error) {
	about := s.packet(text, r.reply)
	if r.edit != nil {
		r.edit(&about)
	}
	frame := about.MustBuild()
	header := headerLenOf(frame) - etherLen
	if about.Fragmented && s.name == "v6" {
		header += 8
	}
	return testenv.ICMPErrorPacket(s.addr(from), frame, kind.typ, kind.code, kind.rest, header+quote)
}

func (h *host) checkError(program string, s scene, r errorRow, kind errorKind, quote int) error {
	if err := errors.Join(h.reset(), h.fill(s, r.ports, r.flows), h.putDevice(r.device)); err != nil {
		return err
	}
	before, err := h.flows().all()
	if err != nil {
		return err
	}
	packet, err := r.buildError(s, r.from, r.about, kind, quote)
	if err != nil {
		return err
	}
	if r.to != "" {
		packet.Dst = s.addr(r.to)
	}
	copy(packet.DstMAC[:], h.device(program).HardwareAddr)
	adapt(program, &packet)
	want := packet
	if r.out != "" {
		sender := r.sender
		if sender == "" {
			sender = r.from
		}
		if want, err = r.buildError(s, sender, r.out, kind, quote); err != nil {
			return err
		}
		want.DstMAC, want.Options = packet.DstMAC, packet.Options
	}
	return h.checkSame(program, packet.MustBuild(), want.MustBuild(), row{drop: r.drop, redirect: r.redirect}, before)
}

// checkSame runs a program on a frame, and compares verdict, frame, counters and flows.
func (h *host) checkSame(program string, frame, want []byte, r row, flows map[bpf.FlowKey]bpf.Flow) error {
	verdict, result, err := h.runInside(program, frame)
	if err != nil {
		return err
	}
	if err := errors.Join(checkVerdict(verdict, r.verdict()), h.checkCounters(r.drop, sizeFor(program, frame))); err != nil {
		return err
	}
	if !bytes.Equal(result, want) {
		return fmt.Errorf("packet is %x, want %x: %w", result, want, testenv.VerifyChecksums(result))
	}
	after, err := h.flows().all()
	if err == nil && !equal(after, flows) {
		err = fmt.Errorf("flows changed to %+v from %+v", after, flows)
	}
	return err
}

// without sets the UDP checksum to 0, which means none.
func without(p *testenv.Packet) { p.NoChecksum = true }

// firstFragment makes the packet the first fragment of several.
func firstFragment(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 99 }

// lastFragment makes it a fragment without ports.
func lastFragment(p *testenv.Packet) {
	*p = testenv.Packet{
		SrcMAC: p.SrcMAC, DstMAC: p.DstMAC, Src: p.Src, Dst: p.Dst, TTL: p.TTL, Proto: p.Proto,
		Fragmented: true, FragOffset: 1400, IPID: 99, Payload: "the rest of some packet",
	}
}

// withOptions gives an IPv4 packet options.
func withOptions(p *testenv.Packet) { p.Options = "\x94\x04\x00\x00" }

// TestICMPErrorsTruncated truncates the quoted packet at every length. With fewer than 8 bytes
// behind its IP header the connection is unknown.
func TestICMPErrorsTruncated(t *testing.T) {
	h := newHost(t)
	for _, tc := range []struct {
		program, from, about, out, sender, drop string
		flows                                   []flow
	}{
		{
			program: bpf.ProgFromUplink, from: "router", about: "node:20000 > remote:80",
			flows: []flow{snat("remote:80", "node:20000", "pod:4000")}, out: "pod:4000 > remote:80",
		},
		{
			program: bpf.ProgToUplink, from: "pod", about: "remote:5000 > pod:80",
			flows: []flow{dnat("remote:5000", "pod:80", "node:8080")}, out: "remote:5000 > node:8080", sender: "node", drop: "truncated",
		},
	} {
		for _, s := range (row{on: withPorts}).scenes() {
			t.Run(tc.program+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				testenv.Must(t, errors.Join(h.reset(), h.fill(s, nil, tc.flows)))
				flows, err := h.flows().all()
				testenv.Must(t, err)
				kind, r := errorKinds[s.name][1], errorRow{}
				whole, err := r.buildError(s, tc.from, tc.about, kind, 1<<16)
				testenv.Must(t, err)
				for length := range len(whole.Payload) + 1 {
					if s.proto == tcp && length == s.headerLen()-etherLen+17 {
						continue // half a checksum cannot be updated
					}
					packet, want, verdict := whole, whole, row{}
					switch {
					case length >= s.headerLen()-etherLen+8 && tc.sender == "":
						want, err = r.buildError(s, tc.from, tc.out, kind, 1<<16)
					case length >= s.headerLen()-etherLen+8:
						want, err = r.buildError(s, tc.sender, tc.out, kind, 1<<16)
					default:
						verdict.drop = tc.drop
					}
					testenv.Must(t, err)
					packet.Payload, want.Payload = packet.Payload[:length], want.Payload[:length]
					copy(packet.DstMAC[:], h.device(tc.program).HardwareAddr)
					want.DstMAC = packet.DstMAC
					err = errors.Join(h.clearCounters(), h.checkSame(tc.program, packet.MustBuild(), want.MustBuild(), verdict, flows))
					if err != nil {
						t.Errorf("%d bytes: %v", length, err)
					}
				}
			})
		}
	}
}
