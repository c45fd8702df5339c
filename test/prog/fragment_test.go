package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// fragmentRow is a fragmented packet. Its fragments must become those of the packet out.
type fragmentRow struct {
	name    string
	program string
	on      []proto
	only    string

	ports []hostPort
	flows []flow

	in       string
	reply    bool
	edit     func(p *testenv.Packet)
	out      string
	redirect bool
	after    []flow // nil: not checked
}

const (
	fragmentSize  = 24 // bytes of payload: enough for a TCP header
	fragmentCount = 4
)

// cutUp returns the fragments of a packet. The payload depends on the id.
func (h *host) cutUp(program string, s scene, text string, r fragmentRow, id uint32) ([][]byte, error) {
	p := s.packet(text, r.reply)
	p.Payload = fmt.Sprintf("%-*d", fragmentSize*fragmentCount-22, id)
	copy(p.DstMAC[:], h.device(program).HardwareAddr)
	if r.edit != nil {
		r.edit(&p)
	}
	adapt(program, &p)
	return testenv.Fragment(p.MustBuild(), fragmentSize, id)
}

func fragmentRows() []fragmentRow {
	const (
		fromContainer, toLoopback = bpf.ProgFromContainer, bpf.ProgToLoopback
		fromUplink, toUplink      = bpf.ProgFromUplink, bpf.ProgToUplink
	)
	toAny := []hostPort{{host: "any:8080", to: "pod2:80"}}
	hairpinFlows := hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80")
	rows := []fragmentRow{
		{name: "masqueraded", program: toUplink, in: outgoing, out: "node:* > remote:80"},
		{name: "masqueraded by address", program: toUplink, on: withoutPorts, in: "pod:0 > remote:0", out: "node:0 > remote:0", after: []flow{snat("remote:0", "node:0", "pod:0")}},
		{name: "masqueraded without checksum", program: toUplink, on: []proto{udp}, only: "v4", edit: without, in: outgoing, out: "node:* > remote:80"},
		{
			name: "a reply from a host port", program: toUplink, on: withPorts, reply: true,
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080")}, in: "pod:80 > remote:5000", out: "node2:8080 > remote:5000",
		},
		{
			name: "a reply from a host port of a pod without ipMasq", program: toUplink, on: withPorts, reply: true,
			flows: []flow{dnat("remote:5000", "plain:80", "node:8080")}, in: "plain:80 > remote:5000", out: "node:8080 > remote:5000",
		},
		{
			name: "a reply from the pod's own address", program: toUplink, reply: true,
			flows: []flow{dnat("remote:5000", "pod:80", "pod:80")}, in: "pod:80 > remote:5000", out: "pod:80 > remote:5000",
		},
		{name: "from a pod without ipMasq", program: toUplink, in: "plain:80 > remote:5000", out: "plain:80 > remote:5000"},
		{
			name: "a reply", program: fromUplink, reply: true,
			flows: []flow{snat("remote:80", "node:20000", "pod:4000")}, in: "remote:80 > node:20000", out: "remote:80 > pod:4000",
		},
		{
			name: "a reply without ports", program: fromUplink, on: withoutPorts,
			flows: []flow{snat("remote:0", "node:0", "pod:0")}, in: "remote:0 > node:0", out: "remote:0 > pod:0",
		},
		{
			name: "to a host port", program: fromUplink, on: withPorts, ports: toAny,
			in: "remote:5000 > node:8080", out: "remote:5000 > pod2:80",
		},
		{
			name: "to a host port without checksum", program: fromUplink, on: []proto{udp}, only: "v4", edit: without, ports: toAny,
			in: "remote:5000 > node:8080", out: "remote:5000 > pod2:80",
		},
		{name: "to a pod", program: fromUplink, in: "remote:5000 > pod:80", out: "remote:5000 > pod:80"},
		{name: "to the host", program: fromUplink, ports: toAny, in: "remote:5000 > node:8081", out: "remote:5000 > node:8081"},
		{name: "to the host without ports", program: fromUplink, on: withoutPorts, in: "remote:0 > node:0", out: "remote:0 > node:0"},
		{
			name: "from the host to a host port", program: toLoopback, on: withPorts, ports: toAny,
			in: "loopback:5000 > loopback:8080", out: "podgw:* > pod2:80", redirect: true,
		},
		{
			name: "to another pod's host port", program: fromContainer, on: withPorts, ports: toAny,
			in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
		},
		{
			name: "a hairpin reply to another pod", program: fromContainer, on: withPorts, flows: hairpinFlows, reply: true,
			in: "pod2:80 > podgw:20000", out: "node:8080 > pod:5000", redirect: true,
		},
	}
	for _, r := range rows {
		switch r.program {
		case fromUplink:
			r.program = bpf.ProgFromUplinkL3
		case toUplink:
			r.program = bpf.ProgToUplinkL3
		default:
			continue
		}
		rows = append(rows, r)
	}
	return rows
}

func TestFragments(t *testing.T) {
	h := newHost(t)
	for _, r := range fragmentRows() {
		t.Run(r.program+" "+r.name, func(t *testing.T) {
			for _, s := range (row{on: r.on, only: r.only}).scenes() {
				t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
					for name, run := range map[string]func(scene, fragmentRow) error{
						"in order": h.inOrder, "twice": h.twice, "without a middle one": h.withHole,
					} {
						if err := errors.Join(h.reset(), h.fill(s, r.ports, r.flows), run(s, r)); err != nil {
							t.Errorf("%s: %v", name, err)
						}
					}
				})
			}
		})
	}
}

func (h *host) inOrder(s scene, r fragmentRow) error {
	return h.inTurn(s, r, 99, 0, 1, 2, 3)
}

// twice reuses the id, and repeats fragments.
func (h *host) twice(s scene, r fragmentRow) error {
	return errors.Join(h.inTurn(s, r, 99, 0, 1, 2, 3), h.inTurn(s, r, 99, 0, 0, 1, 2, 2, 3))
}

func (h *host) withHole(s scene, r fragmentRow) error {
	return h.inTurn(s, r, 99, 0, 1, 3)
}

// inTurn sends fragments of one packet in an order that begins with the first one.
func (h *host) inTurn(s scene, r fragmentRow, id uint32, order ...int) error {
	frames, err := h.cutUp(r.program, s, r.in, r, id)
	if err != nil {
		return err
	}
	var want [][]byte
	for _, i := range order {
		verdict, result, err := h.runInside(r.program, frames[i])
		if err != nil {
			if untestable(r.program, frames[i]) {
				continue
			}
			return err
		}
		if err := checkVerdict(verdict, row{redirect: r.redirect}.verdict()); err != nil {
			return fmt.Errorf("fragment %d: %w", i, err)
		}
		if want == nil {
			if want, err = h.wanted(&s, r, id, result); err != nil {
				return err
			}
		}
		if string(result) != string(want[i]) {
			return fmt.Errorf("fragment %d is %x, want %x", i, result, want[i])
		}
	}
	if r.after == nil {
		return h.checkCounters("", 0)
	}
	return errors.Join(h.checkCounters("", 0), h.checkFlows(s, r.after))
}

// wanted returns the expected fragments. The port "*" is taken from the actual first one.
func (h *host) wanted(s *scene, r fragmentRow, id uint32, first []byte) ([][]byte, error) {
	p, err := testenv.Decode(first)
	if err != nil {
		return nil, err
	}
	if s.star = s.sourcePort(p); r.redirect && !inRange(s.star) && p.Src == s.addr("podgw") {
		return nil, fmt.Errorf("port %d is outside of the masquerading range", s.star)
	}
	return h.cutUp(r.program, *s, r.out, r, id)
}

// TestInterleavedFragments interleaves fragments of packets that differ from the first one in
// their ports and one of id, protocol and address.
func TestInterleavedFragments(t *testing.T) {
	h := newHost(t)
	for _, program := range []string{bpf.ProgFromUplink, bpf.ProgFromUplinkL3} {
		for _, f := range addressings {
			t.Run(program+" "+f.name, func(t *testing.T) {
				type stream struct {
					scene
					in, out  string
					id       uint32
					from, to [][]byte
				}
				streams := []*stream{
					{scene: scene{addressing: f, proto: udp}, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80", id: 7},
					{scene: scene{addressing: f, proto: udp}, in: "remote:5000 > node:8081", out: "remote:5000 > pod2:80", id: 8},
					{scene: scene{addressing: f, proto: tcp}, in: "remote:5000 > node:8081", out: "remote:5000 > pod2:80", id: 7},
					{scene: scene{addressing: f, proto: udp}, in: "remote2:5000 > node:8081", out: "remote2:5000 > pod2:80", id: 7},
					{scene: scene{addressing: f, proto: udp}, in: "remote:5001 > node2:8081", out: "remote:5001 > pod2:80", id: 7},
				}
				errs := []error{h.reset()}
				for _, s := range streams {
					errs = append(errs, h.fill(s.scene, []hostPort{{host: "any:8080", to: "pod:80"}, {host: "any:8081", to: "pod2:80"}}, nil))
					for text, frames := range map[string]*[][]byte{s.in: &s.from, s.out: &s.to} {
						all, err := h.cutUp(program, s.scene, text, fragmentRow{}, s.id)
						*frames, errs = all, append(errs, err)
					}
				}
				testenv.Must(t, errors.Join(errs...))
				for i := range streams[0].from {
					for _, s := range streams {
						if i >= len(s.from) || untestable(program, s.from[i]) {
							continue
						}
						verdict, result, err := h.runInside(program, s.from[i])
						if err := errors.Join(err, checkVerdict(verdict, verdictNext)); err != nil || string(result) != string(s.to[i]) {
							t.Errorf("%s, fragment %d is %x, want %x: %v", s.in, i, result, s.to[i], err)
						}
					}
				}
				// Reuse the id of the first packet for other ports.
				again := fragmentRow{program: program, in: streams[1].in, out: streams[1].out}
				if err := h.inTurn(streams[1].scene, again, streams[0].id, 0, 1, 2, 3); err != nil {
					t.Error("reused id:", err)
				}
			})
		}
	}
}
