package prog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestIPv6Options inserts IPv6 option headers before TCP, UDP and echo, up to the limits of
// parse.h: the result is the same as without them.
func TestIPv6Options(t *testing.T) {
	const (
		hop  = unix.IPPROTO_HOPOPTS
		dest = unix.IPPROTO_DSTOPTS
	)
	type header struct {
		kind  byte
		units int
	}
	h := newHost(t)
	for _, tc := range []struct {
		program string
		row
	}{
		{bpf.ProgToUplink, row{in: "pod:4000 > remote:80"}},
		{bpf.ProgFromUplink, row{in: "remote:5000 > node:8080", ports: []hostPort{{host: "any:8080", to: "pod:80"}}, on: withPorts}},
	} {
		for _, s := range (row{only: "v6", on: tc.on}).scenes() {
			testenv.Must(t, h.resetTo(s, tc.row))
			want := h.result(t, tc.program, s.packet(tc.in, false).MustBuild())
			for _, headers := range [][]header{{{hop, 1}}, {{dest, 6}}, {{dest, 1}, {hop, 1}}, {{dest, 6}, {hop, 6}}} {
				t.Run(fmt.Sprintf("%s %s %v", tc.program, s.proto, headers), func(t *testing.T) {
					testenv.Must(t, h.resetTo(s, tc.row))
					frame := s.packet(tc.in, false).MustBuild()
					length := 0
					for _, header := range headers { // inserts each before the previous ones
						frame = extend(s, frame, header.kind, header.units)
						length += 8 * header.units
					}
					got := h.result(t, tc.program, frame)
					got = slices.Delete(bytes.Clone(got), s.headerLen(), s.headerLen()+length)
					got[20] = s.number()
					binary.BigEndian.PutUint16(got[18:], uint16(len(got)-s.headerLen()))
					if !bytes.Equal(got, want) {
						t.Errorf("got  %x\nwant %x", got, want)
					}
				})
			}
		}
	}
}

// TestIPv6OptionsBeyondLimits has packets that cannot be masqueraded, and must not leave as they are.
func TestIPv6OptionsBeyondLimits(t *testing.T) {
	var rows []row
	for name, units := range map[string][]int{"three": {1, 1, 1}, "a long one": {7}, "the longest": {256}} {
		rows = append(rows, row{
			name: name, only: "v6", in: "pod:4000 > remote:80", drop: "protocol",
			raw: func(s scene, frame []byte) []byte {
				for _, n := range units {
					frame = extend(s, frame, unix.IPPROTO_DSTOPTS, n)
				}
				return frame
			},
		})
	}
	runRows(t, bpf.ProgToUplink, rows)
}

// resetTo fills the maps for a row.
func (h *host) resetTo(s scene, r row) error {
	if err := h.reset(); err != nil {
		return err
	}
	return h.fill(s, r.ports, r.flows)
}

// result returns the frame after a program, which must let it pass.
func (h *host) result(t *testing.T, program string, frame []byte) []byte {
	t.Helper()
	copy(frame, h.device(program).HardwareAddr)
	verdict, result, err := h.runInside(program, frame)
	testenv.Must(t, err)
	testenv.Must(t, checkVerdict(verdict, verdictNext))
	return result
}

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
			testenv.Must(t, errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod2:80"}}, entries)))
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
			testenv.NoError(t, err)
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
