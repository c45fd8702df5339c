package prog

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestParseAgain sends packets through an ingress hook and the stack, which may have changed them, or has sent
// another packet. The last hook must treat each like a packet that it has to parse.
func TestParseAgain(t *testing.T) {
	h := newHost(t)
	edits := []struct {
		name string
		only proto
		v4   bool
		edit func(*testenv.Packet)
	}{
		{name: "as it was", edit: func(*testenv.Packet) {}},
		{name: "TTL", edit: func(p *testenv.Packet) { p.TTL-- }},
		{name: "source", edit: func(p *testenv.Packet) { p.Src = p.Src.Next() }},
		{name: "destination", edit: func(p *testenv.Packet) { p.Dst = p.Dst.Next() }},
		{name: "source port", edit: func(p *testenv.Packet) { p.SrcPort++ }},
		{name: "destination port", edit: func(p *testenv.Packet) { p.DstPort++ }},
		{name: "length", edit: func(p *testenv.Packet) { p.Payload += "longer" }},
		{name: "a first fragment", edit: func(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 7 }},
		{name: "options", v4: true, edit: func(p *testenv.Packet) { p.Options, p.Payload = "\x01\x01\x01\x01", p.Payload[4:] }},
		{name: "sequence number", only: tcp, edit: func(p *testenv.Packet) { p.Seq++ }},
		{name: "acknowledgment", only: tcp, edit: func(p *testenv.Packet) { p.Ack++ }},
		{name: "FIN", only: tcp, edit: func(p *testenv.Packet) { p.TCPFlags |= testenv.FIN }},
		{name: "RST", only: tcp, edit: func(p *testenv.Packet) { p.TCPFlags |= testenv.RST }},
	}
	for _, way := range []struct{ name, first, last, in, forwarded string }{
		{"to the outside", bpf.ProgFromContainer, bpf.ProgToUplink, "pod:4000 > remote:80", "pod:4000 > remote:80"},
		{"to a host port", bpf.ProgFromUplink, bpf.ProgToContainer, "remote:5000 > node:8080", "remote:5000 > pod:80"},
	} {
		t.Run(way.name, func(t *testing.T) {
			eachScene(t, withPorts, func(t *testing.T, s scene) {
				for _, e := range edits {
					if e.v4 && s.name != "v4" || e.only != "" && e.only != s.proto {
						continue
					}
					first, last := s.packet(way.in, false), s.packet(way.forwarded, false)
					if s.proto == tcp {
						first.TCPFlags, last.TCPFlags = testenv.ACK, testenv.ACK
					}
					first.Payload, last.Payload = "12345678", "12345678"
					e.edit(&last)
					again, err := h.lastHook(s, way.first, way.last, first, last, false)
					parsed, err2 := h.lastHook(s, way.first, way.last, first, last, true)
					if err := errors.Join(err, err2); err != nil {
						t.Fatalf("%s: %v", e.name, err)
					}
					if !reflect.DeepEqual(again, parsed) {
						t.Errorf("%s: got\n%+v, and parsed\n%+v", e.name, again, parsed)
					}
				}
			})
		})
	}
}

// passed is what a program has done with a packet.
type passed struct {
	verdict  uint32
	frame    []byte
	flows    map[bpf.FlowKey]bpf.Flow
	fragment bool // a later one would find its ports
}

// lastHook returns what the program to does with a packet after the program from has had the first one. Between the
// two, another packet is parsed if forget is set.
func (h *host) lastHook(s scene, from, to string, first, last testenv.Packet, forget bool) (got passed, err error) {
	copy(first.DstMAC[:], h.device(from).HardwareAddr)
	copy(last.DstMAC[:], h.device(to).HardwareAddr)
	err = errors.Join(
		h.reset(), h.putFastPathEndpoint(s.addressing, "pod", bpf.FastPathEstablished),
		h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil),
	)
	if err != nil {
		return got, err
	}
	err = h.on(0, func() error {
		for range 2 { // the second one is forwarded by the cache
			if verdict, _, err := h.run(from, first.MustBuild()); err != nil || verdict != verdictNext {
				return fmt.Errorf("%s: verdict %d, %w", from, verdict, err)
			}
		}
		if forget {
			if _, _, err := h.run(bpf.ProgToLoopback, s.packet("remote:9 > remote:9", false).MustBuild()); err != nil {
				return err
			}
		}
		got.verdict, got.frame, err = h.run(to, last.MustBuild())
		return err
	})
	if err != nil {
		return got, err
	}
	got.frame = bytes.Clone(got.frame)
	got.fragment = h.programs.Maps[bpf.MapFragments].NextKey(nil, &bpf.FragmentKey{}) == nil
	got.flows, err = h.flows().all()
	for key, flow := range got.flows {
		flow.LastSeen, flow.Created = 0, 0
		got.flows[key] = flow
	}
	return got, err
}
