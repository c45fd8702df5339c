package prog

import (
	"errors"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestTruncated truncates packets at every length within their headers: no program changes one.
func TestTruncated(t *testing.T) {
	h := newHost(t)
	entries := []flow{
		snat("remote:80", "node:20000", "pod:4000"), dnat("remote:5000", "pod:80", "node:8080"),
	}
	entries = append(entries, hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80")...)
	eachScene(t, nil, func(t *testing.T, s scene) {
		for _, tc := range []struct{ program, in string }{
			{bpf.ProgToUplink, "pod:4000 > remote:80"},
			{bpf.ProgToUplink, "pod:80 > remote:5000"},
			{bpf.ProgFromUplink, "remote:80 > node:20000"},
			{bpf.ProgFromUplink, "remote:5000 > node:8080"},
			{bpf.ProgFromContainer, "pod:5000 > node:8080"},
			{bpf.ProgFromContainer, "pod2:80 > podgw:20000"},
			{bpf.ProgToLoopback, "loopback:5000 > loopback:8080"},
		} {
			if err := errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod2:80"}}, entries)); err != nil {
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

func (h *host) runCut(program string, s scene, frame []byte) error {
	verdict, result, err := h.run(program, frame)
	if err != nil {
		if len(frame) < s.headerLen() {
			return nil // some kernels do not accept less than an IP header
		}
		return err
	}
	// to_uplink drops packets that it must masquerade; it needs the address to know.
	want := row{}
	if program == bpf.ProgToUplink && len(frame) >= s.headerLen() {
		want.drop = "truncated"
	}
	if err := checkVerdict(verdict, want.verdict()); err != nil {
		return err
	}
	if !slices.Equal(result, frame) {
		return errors.New("changed")
	}
	return nil
}
