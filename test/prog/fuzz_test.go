package prog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var programs = []string{
	bpf.ProgToLoopback, bpf.ProgFromContainer, bpf.ProgToContainer,
	bpf.ProgFromUplink, bpf.ProgFromUplinkL3,
	bpf.ProgToUplink, bpf.ProgToUplinkL3,
}

// seeds returns packets that programs translate, and edited copies as in the rows.
func seeds(random *rand.Rand) [][]byte {
	var frames [][]byte
	for _, s := range (row{}).scenes() {
		for _, text := range []string{
			"pod:4000 > remote:80", "pod:80 > remote:5000", "pod2:80 > pod:5000", "pod:5000 > node:8080",
			"remote:80 > node:20000", "remote:5000 > node:8080", "remote:5000 > pod:80",
			"pod2:80 > podgw:20000", "loopback:5000 > loopback:8080",
		} {
			p := s.packet(text, random.IntN(2) == 0)
			frame := p.MustBuild()
			frames = append(frames, frame, fragment(0)(s, frame), tagged(s, bytes.Clone(frame)), cut(3)(s, frame))
			kind := errorKinds[s.name][random.IntN(4)]
			about, err := testenv.ICMPErrorPacket(p.Dst, replyTo(p).MustBuild(), kind.typ, kind.code, kind.rest, s.headerLen()-etherLen+20)
			if err != nil {
				panic(err)
			}
			frames = append(frames, about.MustBuild())
			if s.name == "v4" {
				p.Options = "\x01\x01\x01\x00"
				frames = append(frames, p.MustBuild())
			} else {
				frames = append(frames, extended(s, bytes.Clone(frame)))
			}
		}
	}
	return frames
}

// FuzzPackets feeds arbitrary bytes to all programs, with one entry of each kind in the maps.
func FuzzPackets(f *testing.F) {
	h := newHost(f)
	testenv.Must(f, h.prepareFuzz())
	for _, frame := range seeds(rand.New(rand.NewPCG(1, 1))) {
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if err := h.Do(func() error { return h.feed(frame) }); err != nil {
			t.Errorf("%x: %v", frame, err)
		}
	})
}

// TestMutatedPackets is FuzzPackets for every test run: with mutated seeds, and with packets
// between random addresses and ports of the tables.
func TestMutatedPackets(t *testing.T) {
	const (
		seed   = 7
		rounds = 10000
	)
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	corpus := seeds(random)
	for name, next := range map[string]func() []byte{
		"changed": func() []byte { return mutate(random, corpus[random.IntN(len(corpus))]) },
		"whole":   func() []byte { return randomFrame(random) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			testenv.Must(t, h.prepareFuzz())
			err := h.Do(func() error {
				for range rounds {
					frame := next()
					if err := h.feed(frame); err != nil {
						return fmt.Errorf("%x: %w", frame, err)
					}
				}
				return nil
			})
			testenv.NoError(t, err)
		})
	}
}

// randomFrame returns a packet between addresses and ports in the maps, an ICMP error about one,
// or a fragment, with valid checksums.
func randomFrame(random *rand.Rand) []byte {
	pick := func(texts ...string) string { return texts[random.IntN(len(texts))] }
	host := func() string {
		return pick("pod", "pod2", "plain", "podgw", "node", "node2", "remote", "remote2", "onlink", "loopback")
	}
	port := func() string { return pick("80", "4000", "5000", "8080", "20000", "20001", "999") }
	s := scene{addressing: addressings[random.IntN(2)], proto: []proto{tcp, udp, echo, sctp, gre}[random.IntN(5)]}
	p := s.packet(host()+":"+port()+" > "+host()+":"+port(), random.IntN(2) == 0)
	if s.proto == tcp {
		p.TCPFlags = uint8(random.IntN(1 << 6))
	}
	p.NoChecksum = s.proto == udp && s.name == "v4" && random.IntN(4) == 0
	p.Payload += string(make([]byte, 80))
	if random.IntN(3) == 0 {
		kinds := errorKinds[s.name]
		kind := kinds[random.IntN(len(kinds))]
		about, err := testenv.ICMPErrorPacket(s.addr(host()), p.MustBuild(), kind.typ, kind.code, kind.rest, s.headerLen()-etherLen+8+random.IntN(120))
		if err != nil {
			panic(err)
		}
		if p = about; random.IntN(8) == 0 {
			p.Dst = s.addr(host())
		}
	}
	adapt(bpf.ProgFromUplinkL3, &p)
	frame := p.MustBuild()
	if random.IntN(3) == 0 {
		fragments, err := testenv.Fragment(frame, fragmentSize, uint32(random.IntN(8)))
		if err != nil {
			panic(err)
		}
		frame = fragments[random.IntN(len(fragments))]
	}
	return frame
}

// mutate changes up to three bytes, mostly in headers, and sometimes the length.
func mutate(random *rand.Rand, frame []byte) []byte {
	frame = bytes.Clone(frame)
	for range random.IntN(4) {
		frame[12+random.IntN(min(len(frame)-12, 64))] = byte(random.Uint32())
	}
	switch random.IntN(8) {
	case 0:
		frame = frame[:etherLen+random.IntN(len(frame)-etherLen)]
	case 1:
		frame = append(frame, make([]byte, random.IntN(1400))...)
	}
	return frame
}

func (h *host) prepareFuzz() error {
	if err := h.reset(); err != nil {
		return err
	}
	for _, s := range (row{}).scenes() {
		flows := []flow{snat("remote:80", "node:20000", "pod:4000")}
		if s.proto != echo { // which has no host ports
			flows = append(flows, hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80")...)
			flows = append(flows, dnat("remote:5000", "pod:80", "node:8080"))
		}
		if err := h.fill(s, []hostPort{{host: "any:8080", to: "pod2:80"}}, flows); err != nil {
			return err
		}
	}
	return nil
}

// feed runs all programs on a frame, addressed to their device.
func (h *host) feed(frame []byte) error {
	if len(frame) < etherLen || len(frame) > 2000 {
		return nil // the kernel delivers no such packets
	}
	wasValid := testenv.VerifyChecksums(frame) == nil
	for _, program := range programs {
		frame := bytes.Clone(frame)
		copy(frame, h.device(program).HardwareAddr)
		verdict, result, err := h.run(program, frame)
		if err != nil {
			if untestable(program, frame) {
				continue
			}
			return fmt.Errorf("%s: %w", program, err)
		}
		switch verdict {
		case verdictNext:
		case verdictRedirect:
			if program != bpf.ProgToLoopback && program != bpf.ProgFromContainer {
				return fmt.Errorf("%s: redirected, which it must not", program)
			}
		case verdictDrop:
			if err := h.mayDrop(program, frame); err != nil {
				return fmt.Errorf("%s: %w", program, err)
			}
			continue
		default:
			return fmt.Errorf("%s: verdict %d", program, int32(verdict))
		}
		if len(result) != len(frame) {
			return fmt.Errorf("%s: %d bytes became %d", program, len(frame), len(result))
		}
		if !bytes.Equal(result[:etherLen], frame[:etherLen]) {
			return fmt.Errorf("%s: the Ethernet header changed", program)
		}
		if err := testenv.VerifyChecksums(result); err != nil && wasValid {
			return fmt.Errorf("%s: %x: %w", program, result, err)
		}
	}
	return nil
}

// mayDrop checks the counters after a packet ended: one drop is counted, or none for a
// fragment, which may be queued. From the outside, only frames with a container's address or two tags are dropped.
func (h *host) mayDrop(program string, frame []byte) error {
	counted, forged := uint64(0), uint64(0)
	for _, reason := range reasons {
		dropped, err := h.dropped(reason)
		if err != nil {
			return err
		}
		counted += dropped.Packets
		if reason == bpf.ReasonOwnSource || reason == bpf.ReasonHeaders {
			forged += dropped.Packets
		}
	}
	if err := h.clearCounters(); err != nil {
		return err
	}
	fromOutside := program == bpf.ProgFromUplink || program == bpf.ProgFromUplinkL3
	switch {
	case counted > 1, counted > forged && fromOutside:
		return fmt.Errorf("dropped, and counted %d times", counted)
	case counted == 0 && !isFragment(program, frame):
		return errors.New("dropped, but not counted")
	}
	return nil
}

// isFragment reads the family where a test run does: see l3_test.go.
func isFragment(program string, frame []byte) bool {
	etherType, packet := frame[12:14], frame[etherLen:]
	if isL3(program) {
		etherType = packet[12:14]
	}
	if binary.BigEndian.Uint16(etherType) == unix.ETH_P_IP {
		return binary.BigEndian.Uint16(packet[6:])&0x3fff != 0
	}
	return packet[6] == unix.IPPROTO_FRAGMENT
}
