package prog

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// offload is a flow of kind FlowOffload. between has the sides in the order of the key,
// "address:port > address:port".
type offload struct {
	between   string
	states    bpf.OffloadState
	owners    uint64
	outside   bool          // one side is behind the uplink
	moves     uint8         // to other uplinks
	elsewhere bool          // behind another one
	ctSeen    time.Duration // since conntrack last saw the connection
	ct        uint64        // the host's rules translate it: the address of conntrack's entry
	slow      uint32        // the end of side 1's data in conntrack, which has just passed the stack
}

const (
	both  = 3 * bpf.OffloadDelivered
	ends0 = bpf.OffloadFIN
	ends1 = 2 * bpf.OffloadFIN
)

// The connections of the rows. The side with the lower port is the first.
var (
	podToPod     = offload{between: "pod2:80 > pod:4000", states: both, owners: owners["pod"] ^ owners["pod2"]}
	podToOutside = offload{between: "remote:80 > pod:4000", states: both, owners: owners["pod"], outside: true}
	outsideToPod = offload{between: "pod:80 > remote:5000", states: both, owners: owners["pod"], outside: true}
	fromRefused  = offload{between: "pod:80 > refused:5000", states: both, owners: owners["pod"], outside: true}
)

func (o offload) state(states bpf.OffloadState) offload { o.states = states; return o }
func (o offload) ctSeenAgo(ago time.Duration) offload   { o.ctSeen = ago; return o }
func (o offload) ownedBy(owners uint64) offload         { o.owners = owners; return o }
func (o offload) moved(moves uint8) offload             { o.moves = moves; return o }
func (o offload) byAnotherUplink() offload              { o.elsewhere = true; return o }

func (h *host) offload(s scene, o offload) error {
	if o.between == "" {
		return nil
	}
	first, second := s.sides(o.between, false)
	key := bpf.FlowKey{
		Remote: wire(first.Addr()), RemotePort: first.Port(), Local: wire(second.Addr()), LocalPort: second.Port(),
		Protocol: s.number(), Kind: bpf.FlowOffload,
	}
	value := bpf.Offload{
		Moves: o.moves, Translated: uint8(min(o.ct, 1)), Ct: o.ct, Owner: owners["pod"], Payer: o.owners, CtSeen: ticks(o.ctSeen), State: o.states, FinSeq: [2]uint32{1000, 2000},
		FlowState: bpf.FlowEstablished, CtAck: [2]uint32{o.slow}, Slow: [2]uint8{1: uint8(min(o.slow, 1))},
	}
	if s.proto == udp {
		value.FlowState = bpf.FlowUDPStream
	}
	if o.outside {
		value.Uplink = uint32(h.uplink.Index)
		if o.elsewhere {
			value.Uplink += 1000
		}
	}
	return h.flows().Put(key, *(*bpf.Flow)(unsafe.Pointer(&value)))
}

// fastPathRow is a packet of a connection that may bypass the stack. If it does, a second such packet
// bypasses it by the forwarding cache.
type fastPathRow struct {
	name  string
	on    []proto // nil: withPorts
	only  string
	path  bpf.FastPath // of both pods; 0: established
	never string       // a pod with fastPath never
	known offload
	ports []hostPort
	flows []flow

	in    string
	flags uint8 // TCP; 0: ACK
	edit  func(*testenv.Packet)

	out  string // "": the packet goes to the stack unchanged
	ends bool   // the entry is removed
}

const podMTU = 1000

var podMAC, hostMAC = testenv.MAC{2, 0xbb, 0, 0, 0, 1}, testenv.MAC{2, 0xbb, 0, 0, 0, 2}

func (h *host) putFastPathEndpoint(f addressing, pod string, path bpf.FastPath) error {
	return h.programs.Maps[bpf.MapEndpoints].Put(f.wire(pod), bpf.Endpoint{
		Owner: owners[pod], Network: 1, Ifindex: uint32(h.veth.Index), Gateway: f.wire("podgw"),
		Flags: bpf.EndpointMasq, Mac: podMAC, HostMac: hostMAC, Mtu: podMTU, FastPath: path,
	})
}

func (h *host) checkFastPath(program string, s scene, r fastPathRow) error {
	path := r.path
	if path == 0 {
		path = bpf.FastPathEstablished
	}
	errs := []error{
		h.reset(), h.fill(s, r.ports, r.flows),
		h.emptyForwardingCache(),
		h.offload(s, r.known),
	}
	for _, pod := range []string{"pod", "pod2"} {
		podPath := path
		if pod == r.never {
			podPath = bpf.FastPathNever
		}
		errs = append(errs, h.putFastPathEndpoint(s.addressing, pod, podPath))
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
	for _, tier := range []string{"first packet", "second packet", "forwarding cache"} {
		if err := h.checkBypass(program, s, r, packet, frame); err != nil {
			return fmt.Errorf("%s: %w", tier, err)
		}
		if r.out == "" || r.ends {
			break
		}
	}
	known, err := h.flows().offloads(s.number())
	if err == nil && r.known.between != "" && (len(known) == 0) != r.ends {
		err = fmt.Errorf("offload entries afterwards: %+v", known)
	}
	return err
}

// checkBypass checks that a packet bypasses the stack as the row says, or goes to it unchanged.
func (h *host) checkBypass(program string, s scene, r fastPathRow, packet testenv.Packet, frame []byte) error {
	verdict, result, err := h.runInside(program, frame)
	if err != nil {
		return err
	}
	if r.out == "" {
		if err := checkVerdict(verdict, verdictNext); err != nil || !bytes.Equal(result, frame) {
			return fmt.Errorf("packet is %x, should be unchanged: %x (%v)", result, frame, err)
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
	if !strings.Contains(r.out, "> remote") { // else bpf_redirect_neigh writes the MAC addresses later
		want.DstMAC, want.SrcMAC = podMAC, hostMAC
	} else {
		got.DstMAC, got.SrcMAC = want.DstMAC, want.SrcMAC
	}
	if diff := testenv.Diff(got, want); diff != "" {
		return fmt.Errorf("packet differs:\n%s", diff)
	}
	return nil
}

func TestFastPath(t *testing.T) {
	h := newHost(t)
	for program, rows := range map[string][]fastPathRow{
		bpf.ProgFromContainer: append(podToPodRows(), podToOutsideRows()...),
		bpf.ProgFromUplink:    outsideToPodRows(),
	} {
		for _, r := range rows {
			t.Run(program+" "+r.name, func(t *testing.T) {
				if r.on == nil {
					r.on = withPorts
				}
				for _, s := range (row{on: r.on, only: r.only}).scenes() {
					t.Run(s.name+" "+string(s.proto), func(t *testing.T) {
						testenv.NoError(t, h.checkFastPath(program, s, r))
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

func podToPodRows() []fastPathRow {
	long := func(p *testenv.Packet) { p.Payload = strings.Repeat("x", podMTU) }
	return []fastPathRow{
		{name: "both sides delivered by the stack", known: podToPod, in: between, out: between},
		{name: "both sides delivered, from the server", known: podToPod, in: "pod2:80 > pod:4000", out: "pod2:80 > pod:4000"},
		{name: "unknown to the stack", in: between},
		{name: "only the server's side delivered", known: podToPod.state(1), in: between},
		{name: "only the client's side delivered", known: podToPod.state(2), in: between},
		{name: "another port", known: podToPod, in: "pod:4001 > pod2:80"},
		{name: "SYN of a new connection on the same ports", on: []proto{tcp}, known: podToPod, in: between, flags: testenv.SYN},
		{name: "its SYN-ACK", on: []proto{tcp}, known: podToPod, in: "pod2:80 > pod:4000", flags: testenv.SYN | testenv.ACK},
		{name: "entry of the addresses' former owners", known: podToPod.ownedBy(formerOwner), in: between},
		{name: "UDP not seen by conntrack for 10 s", on: []proto{udp}, known: podToPod.ctSeenAgo(10 * time.Second), in: between},
		{name: "TCP idle for an hour", on: []proto{tcp}, known: podToPod.ctSeenAgo(time.Hour), in: between, out: between},
		{name: "the server's pod has fastPath never", never: "pod2", known: podToPod, in: between},
		{name: "the client's pod has fastPath never", never: "pod", known: podToPod, in: between},
		{name: "TTL 1", known: podToPod, in: between, edit: func(p *testenv.Packet) { p.TTL = 1 }},
		{name: "IP options", only: "v4", known: podToPod, in: between, edit: func(p *testenv.Packet) { p.Options = "\x07\x07\x04\x00\x00\x00\x00\x00" }},
		{name: "a first fragment", known: podToPod, in: between, edit: func(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 7 }},
		{name: "too long for the receiver", known: podToPod, in: between, edit: long},
		{name: "a frame for another host", known: podToPod, in: between, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1})},
		{name: "the first FIN of two", on: []proto{tcp}, known: podToPod, in: between, flags: testenv.FIN | testenv.ACK, out: between},
		{name: "the last ACK", on: []proto{tcp}, known: podToPod.state(both | ends0 | ends1 | 128), in: between, out: between, ends: true},
		{name: "a FIN not acknowledged", on: []proto{tcp}, known: podToPod.state(both | ends0), in: between, edit: func(p *testenv.Packet) { p.Ack-- }, out: between},
		{name: "always", path: always, in: between, out: between},
		{name: "always, SYN of a new connection", on: []proto{tcp}, path: always, in: between, flags: testenv.SYN, out: between},
		{name: "always, ping", on: []proto{echo}, path: always, in: between, out: between},
		{name: "always, but never at the server's pod", path: always, never: "pod2", in: between},
		{name: "always, too long for the receiver", path: always, in: between, edit: long},
	}
}

func podToOutsideRows() []fastPathRow {
	const request = "pod:4000 > remote:80"
	return []fastPathRow{
		{name: "outside: both sides delivered by the stack", known: podToOutside, in: request, out: request},
		{name: "outside: unknown to the stack", in: request},
		{name: "outside: UDP by another uplink", on: []proto{udp}, known: podToOutside.byAnotherUplink(), in: request},
		{name: "outside: a reply", known: outsideToPod, in: "pod:80 > remote:5000", out: "pod:80 > remote:5000"},
		{name: "outside: always", path: always, in: request, out: request},
		{name: "outside: always, but the next hop's MAC is unknown", on: []proto{udp}, path: always, in: "pod:4000 > onlink:80"},
		{name: "outside: always, but no route", path: always, in: "pod:4000 > refused:80"},
		{name: "outside: always, but longer than the MTU", path: always, in: request, edit: func(p *testenv.Packet) { p.Payload = strings.Repeat("x", 1500) }},
		{name: "outside: always, but to the host itself", path: always, in: "pod:4000 > node:80"},
	}
}

func outsideToPodRows() []fastPathRow {
	masqueraded := []flow{snat("remote:80", "node:20000", "pod:4000").with(replied)}
	ports := []hostPort{{host: "any:8080", to: "pod:80"}}
	return []fastPathRow{
		{name: "a reply", known: podToOutside, flows: masqueraded, in: "remote:80 > node:20000", out: "remote:80 > pod:4000"},
		{name: "to a host port", known: outsideToPod, ports: ports, flows: []flow{dnat("remote:5000", "pod:80", "node:8080").with(replied)}, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80"},
		{name: "to a pod's own address", known: outsideToPod, in: "remote:5000 > pod:80", out: "remote:5000 > pod:80"},
		{name: "to a pod, unknown to the stack", in: "remote:5000 > pod:80"},
		{name: "to a pod, UDP by another uplink", on: []proto{udp}, known: outsideToPod.byAnotherUplink(), in: "remote:5000 > pod:80"},
		{name: "to a pod, by an uplink that does not lead to the remote", known: fromRefused.byAnotherUplink(), in: "refused:5000 > pod:80"},
		{name: "to a pod, too long for the receiver", known: outsideToPod, in: "remote:5000 > pod:80", edit: func(p *testenv.Packet) { p.Payload = strings.Repeat("x", podMTU) }},
		{name: "always, a reply", path: always, flows: masqueraded, in: "remote:80 > node:20000", out: "remote:80 > pod:4000"},
		{name: "always, to a pod with the host's source", path: always, in: "node:5000 > pod:80"},
		{name: "always, to a pod with its gateway's source", path: always, in: "podgw:5000 > pod:80"},
		{name: "always, to a pod from an unreachable source", path: always, in: "refused:5000 > pod:80"},
		{name: "always, to a host port", path: always, ports: ports, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80"},
	}
}

// TestICMPErrorsBesideCachedConnections has errors about connections in the forwarding cache: their
// keys are equal to those of the connection's packets.
func TestICMPErrorsBesideCachedConnections(t *testing.T) {
	h := newHost(t)
	masqueraded := []flow{snat("remote:80", "node:20000", "pod:4000").established()}
	fast := fastPathRow{path: always, flows: masqueraded, in: "remote:80 > node:20000", out: "remote:80 > pod:4000"}
	fast.edit = func(p *testenv.Packet) { p.Payload = strings.Repeat("x", podMTU/2) }
	errorAbout := errorRow{flows: masqueraded, from: "router", about: "node:20000 > remote:80", out: "pod:4000 > remote:80"}
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		for _, kind := range errorKinds[s.name] {
			testenv.Must(t, h.checkFastPath(bpf.ProgFromUplink, s, fast))
			if err := h.checkError(bpf.ProgFromUplink, s, errorAbout, kind, 16); err != nil {
				t.Errorf("%+v: %v", kind, err)
			}
		}
	})
}
