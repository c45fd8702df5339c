package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestMasqueradeShare has a pod open flows to one remote from each of its ports. It gets about three
// quarters of the range, and another pod still finds a port for each flow.
func TestMasqueradeShare(t *testing.T) {
	h := newHost(t)
	h.programs = loadOfSize(t, 1<<14)
	s := scene{addressing: v4, proto: udp}
	testenv.Must(t, h.reset())
	open := func(name string, sources int) (ports map[uint16]bool) {
		ports = map[uint16]bool{}
		err := h.Do(func() error {
			for source := range sources {
				p, verdict, err := h.transit(bpf.ProgToUplink, s.packet(fmt.Sprintf("%s:%d > remote:80", name, source+1), false))
				if err != nil {
					return err
				}
				if verdict == verdictDrop {
					continue
				}
				if ports[p.SrcPort] || !inRange(p.SrcPort) {
					return fmt.Errorf("port %d is out of range, or another flow's", p.SrcPort)
				}
				ports[p.SrcPort] = true
			}
			return nil
		})
		testenv.Must(t, err)
		return ports
	}
	const all, most = masqLast - masqFirst + 1, 30000
	greedy := open("pod", most)
	if share := len(greedy) * 100 / all; share < 68 || share > 76 {
		t.Errorf("the pod has %d of %d ports, %d %%, want about 75", len(greedy), all, share)
	}
	const modest = 500
	if got := open("pod2", modest); len(got) != modest {
		t.Errorf("another pod got %d ports, want %d", len(got), modest)
	}
}

// loadOfSize loads another datapath, with that many buckets in flow_table.
func loadOfSize(t *testing.T, buckets uint32) *ebpf.Collection {
	t.Helper()
	spec, err := specOfSize(buckets)
	testenv.Must(t, err)
	programs, err := ebpf.NewCollection(spec)
	testenv.Must(t, err)
	t.Cleanup(programs.Close)
	return programs
}

// newHostWithoutRoutes returns a host that masquerades with the address in the uplink's entry.
func newHostWithoutRoutes(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	for _, f := range addressings {
		h.removeDefaultRoute(t, f)
	}
	testenv.Must(t, h.reset())
	return h
}

func (h *host) setUplinkSource(t *testing.T, name string) {
	t.Helper()
	uplink := bpf.Uplink{Addr4: v4.wire(name), Addr6: v6.wire(name)}
	testenv.Must(t, errors.Join(h.programs.Maps[bpf.MapUplinks].Put(uint32(h.uplink.Index), uplink), h.emptyForwardingCache()))
}

// TestMasqueradeKeepsSource changes the address to masquerade with: a known flow keeps the former one
// while the host has it.
func TestMasqueradeKeepsSource(t *testing.T) {
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		h := newHostWithoutRoutes(t)
		leaves := func(what, want string, opens bool, port uint16) {
			t.Helper()
			p := s.packet(outgoing, false)
			if !opens {
				isSegment(&p)
			}
			scene := s
			scene.star = port
			if _, err := h.hop(&scene, p, false, hop{program: bpf.ProgToUplink, out: want + ":* > remote:80"}); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			s.star = scene.star
		}
		h.setUplinkSource(t, "node2")
		leaves("a new flow", "node2", true, 0)
		first := s.star
		h.setUplinkSource(t, "vip")
		leaves("after the change", "node2", false, first)
		h.setUplinkSource(t, "node")
		leaves("after a second change", "node2", false, first)
		if s.proto == tcp {
			leaves("a new connection", "node", true, 0)
		}
	})
}

// TestMasqueradeLosesSource removes the address with which a flow has left.
func TestMasqueradeLosesSource(t *testing.T) {
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		h := newHostWithoutRoutes(t)
		for _, step := range []struct{ source, want string }{{"onlink", "onlink"}, {"node", "node"}} {
			h.setUplinkSource(t, step.source)
			p := s.packet(outgoing, false)
			isSegment(&p)
			s.star = 0
			if _, err := h.hop(&s, p, false, hop{program: bpf.ProgToUplink, out: step.want + ":* > remote:80"}); err != nil {
				t.Errorf("source %s: %v", step.source, err)
			}
		}
	})
}

// TestSpoofedByAnotherUplink has flows whose remote was reached by another uplink than the packet's
// device, which the reverse path confirms or not. The packet passes either way.
func TestSpoofedByAnotherUplink(t *testing.T) {
	const elsewhere = 999
	var rows []row
	for _, tc := range []struct {
		remote  string
		uplink  uint32
		tracked bool
	}{
		{"remote", 0, true}, {"remote", elsewhere, true}, {"blackhole", 0, true}, {"blackhole", elsewhere, false},
	} {
		before := snat(tc.remote+":80", "node:20000", "pod:4000").idleFor(20 * 1e9)
		before.uplink = tc.uplink
		host := dnat(tc.remote+":5000", "pod:80", "node:8080").established().idleFor(20 * 1e9)
		host.uplink = tc.uplink
		name := fmt.Sprintf("%s, uplink %d", tc.remote, tc.uplink)
		reply := row{
			name: name + ", reply", on: withPorts, flows: []flow{before}, in: tc.remote + ":80 > node:20000", reply: true,
			out: tc.remote + ":80 > pod:4000", after: []flow{before},
		}
		request := row{
			name: name + ", to a host port", on: withPorts, flows: []flow{host}, ports: []hostPort{{host: "node:8080", to: "pod:80"}},
			in: tc.remote + ":5000 > node:8080", edit: isSegment, out: tc.remote + ":5000 > pod:80", after: []flow{host},
		}
		if tc.tracked {
			reply.after = []flow{before.accepted().streaming().idleFor(0)}
			request.after = []flow{host.streaming().idleFor(0)}
		}
		rows = append(rows, reply, request)
	}
	runRows(t, bpf.ProgFromUplink, rows)
}
