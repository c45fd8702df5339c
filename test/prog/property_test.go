package prog

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestMasqueradeRoundTrip sends random flows of random pods to few remotes, so that they compete
// for ports. No two flows to one remote may have the same port, and each reply must reach its
// pod.
func TestMasqueradeRoundTrip(t *testing.T) {
	const (
		seed  = 20250717
		flows = 4000
	)
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t)
	if err := h.reset(); err != nil {
		t.Fatal(err)
	}
	type remote struct {
		netip.AddrPort
		proto uint8
		port  uint16 // the masquerading port
	}
	taken := map[remote]testenv.Packet{}
	var sent []testenv.Packet
	dropped := 0
	err := h.Do(func() error {
		for range flows {
			p, s := randomFlow(random)
			leaves, verdict, err := h.transit(bpf.ProgToUplink, p)
			if err != nil {
				return err
			}
			if verdict == verdictDrop {
				dropped++
				continue
			}
			key := remote{netip.AddrPortFrom(p.Dst, p.DstPort), p.Proto, s.sourcePort(leaves)}
			if other, ok := taken[key]; ok && (other.Src != p.Src || s.sourcePort(other) != s.sourcePort(p)) {
				return fmt.Errorf("%s has the same port as %s", p, other)
			}
			taken[key] = p
			sent = append(sent, p)
		}
		// All replies come last: later flows must not have changed earlier ones.
		for _, p := range sent {
			leaves, _, err := h.transit(bpf.ProgToUplink, p)
			if err != nil {
				return err
			}
			reply := replyTo(leaves)
			back, _, err := h.transit(bpf.ProgFromUplink, reply)
			if err != nil {
				return err
			}
			want := replyTo(p)
			want.SrcMAC, want.DstMAC = back.SrcMAC, back.DstMAC
			if diff := testenv.Diff(back, want); diff != "" {
				return fmt.Errorf("reply to %s:\n%s", p, diff)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	// With less than half of the ports in use, one of 64 probes succeeds.
	if dropped > 0 {
		t.Errorf("%d of %d flows got no port", dropped, flows)
	}
}

// randomFlow returns the first packet of a random flow to one of few remotes.
func randomFlow(random *rand.Rand) (testenv.Packet, scene) {
	s := scene{addressing: addressings[random.IntN(2)], proto: protos[random.IntN(3)]}
	pod := []string{"pod", "pod2"}[random.IntN(2)]
	to := []string{"remote", "remote2", "onlink"}[random.IntN(3)]
	p := s.packet(fmt.Sprintf("%s:%d > %s:%d", pod, 1+random.IntN(65535), to, 80+random.IntN(2)), false)
	payload := make([]byte, random.IntN(64))
	for i := range payload {
		payload[i] = byte(random.Uint32())
	}
	p.Payload, p.TOS, p.TTL = string(payload), uint8(random.Uint32()), uint8(1+random.IntN(255))
	if s.proto == udp && s.name == "v4" {
		p.NoChecksum = random.IntN(4) == 0
	}
	return p, s
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
	for _, s := range (row{on: []proto{udp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
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
}
