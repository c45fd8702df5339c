package prog

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// row is one packet through one program. It runs for IPv4 and IPv6, TCP, UDP and
// ICMP echo, or what on says.
//
// Packets are texts, "source:port > destination:port", in the names of
// names_test.go; for echo, the identifier is the port of the side that asks.
// All pods are endpoints.
type row struct {
	name string
	on   []proto // nil: all
	only string  // "v4" or "v6", or both

	ether bool // this is about the Ethernet header

	// Before.
	ports   []port
	flows   []flow
	kept    []flow // in established
	exempts []exempt

	in    string
	reply bool                           // in is an answer: SYN and ACK, or an echo reply
	edit  func(p *testenv.Packet)        // what else is special about it
	raw   func(s scene, f []byte) []byte // what a Packet cannot say

	// Afterwards. The port "*" is the one that masquerading chose.
	out      string // "": the packet is untouched, byte for byte
	redirect bool   // to another device, instead of the stack
	drop     string // the reason, or "": the packet goes on
	after    []flow // nil: the flows are as before, untouched
}

func runRows(t *testing.T, program string, rows []row) {
	h := newHost(t)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			for _, s := range r.scenes() {
				t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
					if err := h.check(program, s, r); err != nil {
						t.Error(err)
					}
				})
			}
		})
	}
}

func (r row) scenes() []scene {
	var scenes []scene
	on := r.on
	if on == nil {
		on = protos
	}
	for _, f := range families {
		for _, p := range on {
			if r.only == "" || r.only == f.name {
				scenes = append(scenes, scene{family: f, proto: p})
			}
		}
	}
	return scenes
}

func (h *host) check(program string, s scene, r row) error {
	if err := errors.Join(h.reset(), h.fill(s, r.ports, r.flows), h.keep(s, r.kept), h.exempt(s, r.exempts)); err != nil {
		return err
	}
	before, err := contents[bpf.FlowKey, bpf.Flow](h.flows())
	if err != nil {
		return err
	}
	packet := s.packet(r.in, r.reply)
	copy(packet.DstMAC[:], h.device(program).HardwareAddr)
	if r.edit != nil {
		r.edit(&packet)
	}
	suit(program, &packet)
	frame := packet.MustBuild()
	if r.raw != nil {
		frame = r.raw(s, frame)
	}
	verdict, result, err := h.runInside(program, frame)
	if err != nil {
		if untestable(program, frame) {
			return nil
		}
		return err
	}
	if err := errors.Join(checkVerdict(verdict, r.verdict()), h.checkCounters(r.drop, sizeFor(program, frame))); err != nil {
		return err
	}
	if err := checkPacket(&s, r, packet, frame, result); err != nil {
		return err
	}
	if r.after != nil {
		return h.checkFlows(s, r.after)
	}
	after, err := contents[bpf.FlowKey, bpf.Flow](h.flows())
	if err == nil && !equal(after, before) {
		err = fmt.Errorf("flows are %+v, were %+v", after, before)
	}
	return err
}

// verdict is the one that the row wants.
func (r row) verdict() uint32 {
	switch {
	case r.drop != "":
		return verdictDrop
	case r.redirect:
		return verdictRedirect
	default:
		return verdictNext
	}
}

// sizeFor is the length of a frame, as the program sees it.
func sizeFor(program string, frame []byte) int {
	if isL3(program) {
		return len(frame) - etherLen
	}
	return len(frame)
}

// keep puts flows into established.
func (h *host) keep(s scene, flows []flow) error {
	for _, f := range flows {
		key, value := f.wire(s)
		if err := h.established().Put(&key, &value); err != nil {
			return err
		}
	}
	return nil
}

// fill adds the entries of a row to the maps. Of several ports that lead to one
// of a container, the first one has the way back, as package maps does it.
func (h *host) fill(s scene, ports []port, flows []flow) error {
	var errs []error
	for _, port := range ports {
		key, value := port.wire(s)
		errs = append(errs, h.programs.Maps[bpf.MapHostPorts].Put(&key, &value))
		key, value = port.back(s)
		err := h.programs.Maps[bpf.MapHostPorts].Update(&key, &value, ebpf.UpdateNoExist)
		if !errors.Is(err, ebpf.ErrKeyExist) {
			errs = append(errs, err)
		}
	}
	for _, flow := range flows {
		key, value := flow.wire(s)
		errs = append(errs, h.flows().Put(&key, &value))
	}
	return errors.Join(errs...)
}

func checkVerdict(got, want uint32) error {
	if got != want {
		return fmt.Errorf("verdict is %d, want %d", int32(got), int32(want))
	}
	return nil
}

// checkPacket compares what came out with the row, and learns the port "*".
func checkPacket(s *scene, r row, packet testenv.Packet, frame, result []byte) error {
	if r.out == "" {
		if !bytes.Equal(result, frame) {
			return fmt.Errorf("packet is %x, should be untouched: %x", result, frame)
		}
		return nil
	}
	got, err := testenv.Decode(result)
	if err != nil {
		return err
	}
	if err := testenv.VerifyChecksums(result); err != nil {
		return err
	}
	if strings.Contains(r.out, "*") {
		s.star = s.sourcePort(got)
	}
	want := s.readdress(packet, r.out, r.reply)
	if diff := testenv.Diff(got, want); diff != "" {
		return fmt.Errorf("packet differs:\n%s", diff)
	}
	if strings.Contains(r.out, "*") && !inRange(s.star) {
		return fmt.Errorf("port %d is outside of %d to %d", s.star, masqFirst, masqLast)
	}
	return nil
}

// inRange reports whether masquerading may choose the port.
func inRange(port uint16) bool {
	return port >= masqFirst && port <= masqLast
}

func equal[K, V comparable](a, b map[K]V) bool {
	for key, value := range a {
		if other, ok := b[key]; !ok || other != value {
			return false
		}
	}
	return len(a) == len(b)
}
