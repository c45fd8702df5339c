package prog

import (
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

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
		if err := h.check(bpf.ProgToUplink, s, r); err != nil {
			t.Error(err)
		}
	})
}
