package prog

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var programs = []string{
	bpf.DatapathProgFromContainer, bpf.DatapathProgToContainer, bpf.DatapathProgFromUplink, bpf.DatapathProgToUplink,
}

// seeds are packets that programs translate, and what rows do to them.
func seeds(random *rand.Rand) [][]byte {
	var frames [][]byte
	for _, s := range (row{}).scenes() {
		for _, text := range []string{
			"pod:4000 > remote:80", "pod:80 > remote:5000", "pod2:80 > pod:5000", "pod:5000 > node:8080",
			"remote:80 > node:20000", "remote:5000 > node:8080", "remote:5000 > pod:80",
		} {
			p := s.packet(text, random.IntN(2) == 0)
			frame := p.MustBuild()
			frames = append(frames, frame, fragment(0)(s, frame), tagged(s, bytes.Clone(frame)), cut(3)(s, frame))
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

// FuzzPackets feeds any bytes to all programs, with maps that hold one entry of
// each kind.
func FuzzPackets(f *testing.F) {
	h := newHost(f)
	if err := h.prepareFuzz(); err != nil {
		f.Fatal(err)
	}
	for _, frame := range seeds(rand.New(rand.NewPCG(1, 1))) {
		f.Add(frame)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if err := h.Do(func() error { return h.feed(frame) }); err != nil {
			t.Errorf("%x: %v", frame, err)
		}
	})
}

// TestMutatedPackets is FuzzPackets with packets made here, for every run of the tests.
func TestMutatedPackets(t *testing.T) {
	const (
		seed   = 7
		rounds = 20000
	)
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t)
	if err := h.prepareFuzz(); err != nil {
		t.Fatal(err)
	}
	corpus := seeds(random)
	err := h.Do(func() error {
		for range rounds {
			frame := mutate(random, corpus[random.IntN(len(corpus))])
			if err := h.feed(frame); err != nil {
				return fmt.Errorf("%x: %w", frame, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// mutate changes up to three bytes, most often of the headers, and the length.
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
		err := h.fill(s, []port{{host: "any:8080", to: "pod2:80"}}, []flow{
			out("remote:80", "node:20000", "pod:4000"), in("remote:5000", "pod:80", "node:8080"), in("pod:5000", "pod2:80", "node:8080"),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// feed runs all programs on a frame for their device.
func (h *host) feed(frame []byte) error {
	const ipHeader = etherLen + 40 // longer than an IP header of either family
	if len(frame) < etherLen || len(frame) > 2000 {
		return nil // The kernel has no such packets.
	}
	wasRight := testenv.VerifyChecksums(frame) == nil
	for _, program := range programs {
		frame := bytes.Clone(frame)
		copy(frame, h.device(program).HardwareAddr)
		verdict, result, err := h.run(program, frame)
		if err != nil {
			if len(frame) < ipHeader {
				continue // Some kernels do not take less than an IP header.
			}
			return fmt.Errorf("%s: %w", program, err)
		}
		if verdict != verdictNext && verdict != verdictDrop {
			return fmt.Errorf("%s: verdict %d", program, int32(verdict))
		}
		if verdict == verdictDrop && program != bpf.DatapathProgToUplink {
			return fmt.Errorf("%s: dropped", program)
		}
		if len(result) != len(frame) {
			return fmt.Errorf("%s: %d bytes became %d", program, len(frame), len(result))
		}
		if !bytes.Equal(result[:etherLen], frame[:etherLen]) {
			return fmt.Errorf("%s: the Ethernet header changed", program)
		}
		if err := testenv.VerifyChecksums(result); err != nil && wasRight {
			return fmt.Errorf("%s: %w", program, err)
		}
	}
	return nil
}
