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

// row is one packet through one program. It runs for each of IPv4 and IPv6, and of TCP, UDP
// and ICMP echo, unless only and on say otherwise.
//
// Packets are texts, "source:port > destination:port", with the names of names_test.go. The
// port of the side that sends an echo request is the identifier. All pods are endpoints.
type row struct {
	name string
	on   []proto // nil: all
	only string  // "v4" or "v6", or both

	ether     bool                                   // only for devices with Ethernet
	device    string                                 // the pod behind the veth; "": unknown
	forwarded bool                                   // in was received by another device; else the host sends it
	tag       func(s scene, p testenv.Packet) uint32 // tc_index, from another hook
	received  func(s scene, p *testenv.Packet)       // what another hook has received, before the stack changed it

	// The maps before.
	ports   []hostPort
	flows   []flow
	nonMasq []nonMasq

	in    string
	reply bool                           // in is a reply: a SYN-ACK, or an echo reply
	edit  func(p *testenv.Packet)        // changes the packet
	raw   func(s scene, f []byte) []byte // changes the frame, for what a Packet cannot express

	// The packet and the flows afterwards. The port "*" is the one that masquerading chose.
	out      string // "": the packet is unchanged, byte for byte
	redirect bool   // to another device, bypassing the stack
	drop     string // the reason; "": the packet passes
	after    []flow // nil: the flows are unchanged
	anyFlows bool   // a drop may leave any flow, and a void flow may be updated
}

func runRows(t *testing.T, program string, rows []row) {
	h := newHost(t)
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			if r.forwarded {
				testenv.Require(t, ingressDevice)
			}
			for _, s := range r.scenes() {
				t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
					testenv.NoError(t, h.check(program, s, r))
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
	for _, f := range addressings {
		for _, p := range on {
			if r.only == "" || r.only == f.name {
				scenes = append(scenes, scene{addressing: f, proto: p})
			}
		}
	}
	return scenes
}

// eachScene runs a test with each of these protocols, all if on is nil, and with both families.
func eachScene(t *testing.T, on []proto, test func(t *testing.T, s scene)) {
	t.Helper()
	for _, s := range (row{on: on}).scenes() {
		t.Run(s.name+" "+string(s.proto), func(t *testing.T) { test(t, s) })
	}
}

func (h *host) check(program string, s scene, r row) error {
	if err := errors.Join(h.reset(), h.fill(s, r.ports, r.flows), h.fillNonMasq(s, r.nonMasq), h.putDevice(r.device)); err != nil {
		return err
	}
	before, err := h.flows().all()
	if err != nil {
		return err
	}
	packet := s.packet(r.in, r.reply)
	copy(packet.DstMAC[:], h.device(program).HardwareAddr)
	if r.edit != nil {
		r.edit(&packet)
	}
	adapt(program, &packet)
	frame := packet.MustBuild()
	if r.raw != nil {
		frame = r.raw(s, frame)
	}
	if r.tag != nil {
		received := packet
		if r.received != nil {
			r.received(s, &received)
		}
		h.tag = r.tag(s, received)
		defer func() { h.tag = 0 }()
		if err := h.putRouted(s, received); err != nil {
			return err
		}
	}
	if r.forwarded {
		h.ingress = uint32(h.other(program).Index)
		defer func() { h.ingress = 0 }()
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
	if r.anyFlows {
		return nil
	}
	if r.after != nil {
		return h.checkFlows(s, r.after)
	}
	after, err := h.flows().all()
	if err == nil && !equal(after, before) {
		err = fmt.Errorf("flows changed to %+v from %+v", after, before)
	}
	return err
}

// verdict returns the expected verdict.
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

// sizeFor returns the length of a frame as the program sees it.
func sizeFor(program string, frame []byte) int {
	if isL3(program) {
		return len(frame) - etherLen
	}
	return len(frame)
}

// fill adds the entries of a row to the maps. Of several host ports with one target, the first
// gets the reverse entry, as in package maps. The programs mark a pod's port before they create its first flow.
func (h *host) fill(s scene, ports []hostPort, flows []flow) error {
	var errs []error
	for _, port := range ports {
		key, value := port.wire(s)
		errs = append(errs, h.programs.Maps[bpf.MapHostPorts].Put(&key, &value), h.markNumber(key))
		key, value = port.reverse(s)
		err := h.programs.Maps[bpf.MapHostPorts].Update(&key, &value, ebpf.UpdateNoExist)
		if !errors.Is(err, ebpf.ErrKeyExist) {
			errs = append(errs, err)
		}
		errs = append(errs, h.markPort(bpf.PortReplies, key.Protocol, key.Port))
	}
	for _, flow := range flows {
		key, value := flow.wire(s)
		errs = append(errs, h.flows().Put(key, value), h.markPort(bpf.PortReplies, key.Protocol, key.LocalPort))
	}
	return errors.Join(errs...)
}

func checkVerdict(got, want uint32) error {
	if got != want {
		return fmt.Errorf("verdict is %d, want %d", int32(got), int32(want))
	}
	return nil
}

// checkPacket compares the resulting frame with the row, and sets s.star from it.
func checkPacket(s *scene, r row, packet testenv.Packet, frame, result []byte) error {
	if r.out == "" {
		if !bytes.Equal(result, frame) {
			return fmt.Errorf("packet is %x, should be unchanged: %x", result, frame)
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
	if strings.HasPrefix(r.out, "remote:*") { // a client's, as the pod sees it
		if s.star < clientPortMin || s.star == packet.SrcPort {
			return fmt.Errorf("the client's port %d became %d", packet.SrcPort, s.star)
		}
		return nil
	}
	if strings.Contains(r.out, "*") && !inRange(s.star) {
		return fmt.Errorf("port %d is outside of %d to %d", s.star, masqFirst, masqLast)
	}
	return nil
}

const clientPortMin = 1024 // DNAT_PORT_MIN in dnat.h

// inRange reports whether the port is in the masquerading range.
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
