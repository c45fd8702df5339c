package prog

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// offload is an entry of offload_tcp or offload_udp: what the stack has delivered, as
// "source:port > destination:port" in the order of the key.
type offload struct {
	between string
	states  bpf.OffloadState
	owners  uint64
	outside bool // one side is behind the uplink
	idle    time.Duration
}

const (
	both  = 3 * bpf.OffloadDelivered
	ends0 = bpf.OffloadFIN
	ends1 = 2 * bpf.OffloadFIN
)

// Connections as the rows have them. The side with the lower port is the first.
var (
	podToPod     = offload{between: "pod2:80 > pod:4000", states: both, owners: owners["pod"] ^ owners["pod2"]}
	podToOutside = offload{between: "remote:80 > pod:4000", states: both, owners: owners["pod"], outside: true}
	outsideToPod = offload{between: "pod:80 > remote:5000", states: both, owners: owners["pod"], outside: true}
)

func (o offload) state(states bpf.OffloadState) offload { o.states = states; return o }
func (o offload) unseen(idle time.Duration) offload     { o.idle = idle; return o }
func (o offload) of(owners uint64) offload              { o.owners = owners; return o }
func (o offload) byAnotherUplink() offload              { o.outside = !o.outside; return o }

func (h *host) offloads(s scene) *ebpf.Map {
	if s.proto == tcp {
		return h.programs.Maps[bpf.MapOffloadTCP]
	}
	return h.programs.Maps[bpf.MapOffloadUDP]
}

func (h *host) offload(s scene, o offload) error {
	if o.between == "" {
		return nil
	}
	first, second := s.sides(o.between, false)
	key := bpf.OffloadKey{
		Addr: [2]bpf.Addr{wire(first.Addr()), wire(second.Addr())},
		Port: [2]uint16{first.Port(), second.Port()}, Protocol: s.number(),
	}
	value := bpf.Offload{Owners: o.owners, CtSeen: ticks(o.idle), State: o.states, FinSeq: [2]uint32{1000, 2000}}
	if o.outside {
		value.Uplink = uint32(h.uplink.Index)
	}
	return h.offloads(s).Put(&key, &value)
}

// fastRow is a packet of a connection that may go past the stack. Where it does, a second one
// like it does too, the short way.
type fastRow struct {
	name  string
	on    []proto // nil: ported
	only  string
	path  bpf.FastPath // of both pods; 0: established
	never string       // but not of this one
	known offload
	ports []port
	flows []flow

	in    string
	flags uint8 // TCP; 0: ACK
	edit  func(*testenv.Packet)
	raw   func(s scene, f []byte) []byte

	out  string // "": the stack has it, as it came
	ends bool   // afterwards nothing is known of it
}

const podMTU = 1000

var podMAC, hostMAC = testenv.MAC{2, 0xbb, 0, 0, 0, 1}, testenv.MAC{2, 0xbb, 0, 0, 0, 2}

func (h *host) putFastEndpoint(f family, pod string, path bpf.FastPath) error {
	return h.programs.Maps[bpf.MapEndpoints].Put(f.wire(pod), bpf.Endpoint{
		Owner: owners[pod], Network: 1, Ifindex: uint32(h.veth.Index), Gateway: f.wire("podgw"),
		Flags: bpf.EndpointMasq, Mac: podMAC, HostMac: hostMAC, Mtu: podMTU, FastPath: path,
	})
}

func (h *host) checkFast(program string, s scene, r fastRow) error {
	path := r.path
	if path == 0 {
		path = bpf.FastPathEstablished
	}
	errs := []error{
		h.reset(), h.fill(s, r.ports, r.flows),
		empty[bpf.FwdKey, bpf.FwdEntry](h.programs.Maps[bpf.MapFwdCache]),
		empty[bpf.OffloadKey, bpf.Offload](h.offloads(s)),
		h.offload(s, r.known),
	}
	for _, pod := range []string{"pod", "pod2"} {
		of := path
		if pod == r.never {
			of = bpf.FastPathNever
		}
		errs = append(errs, h.putFastEndpoint(s.family, pod, of))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	packet := s.packet(r.in, false)
	packet.SrcMAC = testenv.MAC{2, 0xcc, 0, 0, 0, 1}
	copy(packet.DstMAC[:], h.device(program).HardwareAddr)
	if s.proto == tcp {
		packet.TCPFlags = testenv.ACK
		if r.flags != 0 {
			packet.TCPFlags = r.flags
		}
		packet.Seq, packet.Ack = 2000-uint32(len(packet.Payload))-1, 1000
	}
	if r.edit != nil {
		r.edit(&packet)
	}
	frame := packet.MustBuild()
	if r.raw != nil {
		frame = r.raw(s, frame)
	}
	for _, way := range []string{"the long way", "the short way"} {
		if err := h.goesPast(program, s, r, packet, frame); err != nil {
			return fmt.Errorf("%s: %w", way, err)
		}
		if r.out == "" || r.ends {
			break
		}
	}
	known, err := contents[bpf.OffloadKey, bpf.Offload](h.offloads(s))
	if err == nil && r.known.between != "" && (len(known) == 0) != r.ends {
		err = fmt.Errorf("afterwards %+v is known", known)
	}
	return err
}

// goesPast checks that a packet goes past the stack as the row says, or that the stack has it.
func (h *host) goesPast(program string, s scene, r fastRow, packet testenv.Packet, frame []byte) error {
	verdict, result, err := h.runInside(program, frame)
	if err != nil {
		return err
	}
	if r.out == "" {
		if err := checkVerdict(verdict, verdictNext); err != nil || !bytes.Equal(result, frame) {
			return fmt.Errorf("it is %x, should be untouched: %x (%v)", result, frame, err)
		}
		return nil
	}
	if err := errors.Join(checkVerdict(verdict, verdictRedirect), testenv.VerifyChecksums(result)); err != nil {
		return err
	}
	got, err := testenv.Decode(result)
	if err != nil {
		return err
	}
	want := s.readdress(packet, r.out, false)
	want.TTL--
	if !strings.Contains(r.out, "> remote") { // of what leaves, the next hop decides
		want.DstMAC, want.SrcMAC = podMAC, hostMAC
	} else {
		got.DstMAC, got.SrcMAC = want.DstMAC, want.SrcMAC // the short way has nothing there for it either
	}
	if diff := testenv.Diff(got, want); diff != "" {
		return fmt.Errorf("packet differs:\n%s", diff)
	}
	return nil
}

func TestFast(t *testing.T) {
	h := newHost(t)
	for program, rows := range map[string][]fastRow{
		bpf.ProgFromContainer: append(fastBetween(), fastOut()...),
		bpf.ProgFromUplink:    fastIn(),
	} {
		for _, r := range rows {
			t.Run(program+" "+r.name, func(t *testing.T) {
				if r.on == nil {
					r.on = ported
				}
				for _, s := range (row{on: r.on, only: r.only}).scenes() {
					t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
						if err := h.checkFast(program, s, r); err != nil {
							t.Error(err)
						}
					})
				}
			})
		}
	}
}

const (
	always  = bpf.FastPathAlways
	between = "pod:4000 > pod2:80"
)

func fastBetween() []fastRow {
	long := func(p *testenv.Packet) { p.Payload = strings.Repeat("x", podMTU) }
	return []fastRow{
		{name: "what the stack has let pass", known: podToPod, in: between, out: between},
		{name: "what it has let pass, the other way", known: podToPod, in: "pod2:80 > pod:4000", out: "pod2:80 > pod:4000"},
		{name: "what it has not met", in: between},
		{name: "what it has let pass one way", known: podToPod.state(1), in: between},
		{name: "what it has let pass the other way alone", known: podToPod.state(2), in: between},
		{name: "another port", known: podToPod, in: "pod:4001 > pod2:80"},
		{name: "a new connection on the same ports", on: []proto{tcp}, known: podToPod, in: between, flags: testenv.SYN},
		{name: "its answer", on: []proto{tcp}, known: podToPod, in: "pod2:80 > pod:4000", flags: testenv.SYN | testenv.ACK},
		{name: "of former owners of the addresses", known: podToPod.of(stranger), in: between},
		{name: "UDP that conntrack may forget", on: []proto{udp}, known: podToPod.unseen(10 * time.Second), in: between},
		{name: "TCP that was quiet", on: []proto{tcp}, known: podToPod.unseen(time.Hour), in: between, out: between},
		{name: "one side has fastPath never", never: "pod2", known: podToPod, in: between},
		{name: "the other side has", never: "pod", known: podToPod, in: between},
		{name: "no time to live", known: podToPod, in: between, edit: func(p *testenv.Packet) { p.TTL = 1 }},
		{name: "IP options", only: "v4", known: podToPod, in: between, edit: func(p *testenv.Packet) { p.Options = "\x07\x07\x04\x00\x00\x00\x00\x00" }},
		{name: "a first fragment", known: podToPod, in: between, edit: func(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 7 }},
		{name: "too long for the receiver", known: podToPod, in: between, edit: long},
		{name: "a frame to another host", known: podToPod, in: between, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1})},
		{name: "the first end of two", on: []proto{tcp}, known: podToPod, in: between, flags: testenv.FIN | testenv.ACK, out: between},
		{name: "the last word", on: []proto{tcp}, known: podToPod.state(both | ends0 | ends1 | 128), in: between, out: between, ends: true},
		{name: "an end that is not acknowledged", on: []proto{tcp}, known: podToPod.state(both | ends0), in: between, edit: func(p *testenv.Packet) { p.Ack-- }, out: between},
		{name: "always", path: always, in: between, out: between},
		{name: "always, and a new connection", on: []proto{tcp}, path: always, in: between, flags: testenv.SYN, out: between},
		{name: "always, but a ping as well", on: []proto{echo}, path: always, in: between, out: between},
		{name: "always, but not there", path: always, never: "pod2", in: between},
		{name: "always, too long for the receiver", path: always, in: between, edit: long},
	}
}

func fastOut() []fastRow {
	const asked = "pod:4000 > remote:80"
	return []fastRow{
		{name: "outside: what the stack has let pass", known: podToOutside, in: asked, out: asked},
		{name: "outside: what it has not met", in: asked},
		{name: "outside: by another uplink", known: podToOutside.byAnotherUplink(), in: asked},
		{name: "outside: an answer", known: outsideToPod, in: "pod:80 > remote:5000", out: "pod:80 > remote:5000"},
		{name: "outside: always", path: always, in: asked, out: asked},
		{name: "outside: always, but no neighbour's address", on: []proto{udp}, path: always, in: "pod:4000 > onlink:80"},
		{name: "outside: always, but no way", path: always, in: "pod:4000 > refused:80"},
		{name: "outside: always, but too long", path: always, in: asked, edit: func(p *testenv.Packet) { p.Payload = strings.Repeat("x", 1500) }},
		{name: "outside: always, but the host itself", path: always, in: "pod:4000 > node:80"},
	}
}

func fastIn() []fastRow {
	masqueraded := []flow{out("remote:80", "node:20000", "pod:4000")}
	ports := []port{{host: "any:8080", to: "pod:80"}}
	return []fastRow{
		{name: "a reply", known: podToOutside, flows: masqueraded, in: "remote:80 > node:20000", out: "remote:80 > pod:4000"},
		{name: "to a host port", known: outsideToPod, ports: ports, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80"},
		{name: "to a pod's own address", known: outsideToPod, in: "remote:5000 > pod:80", out: "remote:5000 > pod:80"},
		{name: "to a pod, which the stack has not met", in: "remote:5000 > pod:80"},
		{name: "to a pod, by another uplink", known: outsideToPod.byAnotherUplink(), in: "remote:5000 > pod:80"},
		{name: "to a pod, too long for it", known: outsideToPod, in: "remote:5000 > pod:80", edit: func(p *testenv.Packet) { p.Payload = strings.Repeat("x", podMTU) }},
		{name: "always, a reply", path: always, flows: masqueraded, in: "remote:80 > node:20000", out: "remote:80 > pod:4000"},
		{name: "always, to a pod in another's name", path: always, in: "pod2:5000 > pod:80"},
		{name: "always, to a pod in the host's name", path: always, in: "node:5000 > pod:80"},
		{name: "always, to a pod in the name of its gateway", path: always, in: "podgw:5000 > pod:80"},
		{name: "always, to a pod from nowhere", path: always, in: "refused:5000 > pod:80"},
		{name: "always, to a host port", path: always, ports: ports, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80"},
	}
}

// TestErrorsBesideFastConnections has errors about connections whose packets went the short way a moment
// ago: in terms of the maps they look like those.
func TestErrorsBesideFastConnections(t *testing.T) {
	h := newHost(t)
	masqueraded := []flow{out("remote:80", "node:20000", "pod:4000").state(replied)}
	fast := fastRow{path: always, flows: masqueraded, in: "remote:80 > node:20000", out: "remote:80 > pod:4000"}
	fast.edit = func(p *testenv.Packet) { p.Payload = strings.Repeat("x", podMTU/2) }
	errorAbout := errorRow{flows: masqueraded, from: "router", about: "node:20000 > remote:80", out: "pod:4000 > remote:80"}
	for _, s := range (row{on: ported}).scenes() {
		t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
			for _, kind := range errorKinds[s.name] {
				if err := h.checkFast(bpf.ProgFromUplink, s, fast); err != nil {
					t.Fatal(err)
				}
				if err := h.checkError(bpf.ProgFromUplink, s, errorAbout, kind, 16); err != nil {
					t.Errorf("%+v: %v", kind, err)
				}
			}
		})
	}
}
