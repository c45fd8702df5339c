package prog

import (
	"errors"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestMovedFlowsEnd has a pod's flow on another port than its first candidate. Once no flow that a packet may belong to
// can be alive, nobody looks further for the port of a new one. An entry behind a free candidate shows how far.
func TestMovedFlowsEnd(t *testing.T) {
	h := newHost(t)
	defer h.setMoved(longAhead)
	const first, third, ninth = 0, 2, 8
	for _, tc := range []struct {
		name string
		on   proto
		ack  bool // the packet opens no connection
		seen time.Duration
		want int
	}{
		{"a repeated SYN", tcp, false, 100 * time.Second, third},
		{"no SYN is repeated for so long", tcp, false, 130 * time.Second, first},
		{"an idle connection", tcp, true, 4 * 24 * time.Hour, third},
		{"the connection would have expired", tcp, true, 6 * 24 * time.Hour, first},
		{"a stream", udp, false, 100 * time.Second, third},
		{"the stream would have expired", udp, false, 130 * time.Second, first},
		{"echo requests", echo, false, 20 * time.Second, third},
		{"the echo requests would have expired", echo, false, 40 * time.Second, first},
	} {
		for _, s := range (row{on: []proto{tc.on}}).scenes() {
			test := func(t *testing.T, has int, moved bpf.Moved) {
				want := tc.want
				if want == third {
					want = has
				}
				candidates := h.candidates(t, s, outgoing)
				testenv.Must(t, h.reset())
				s.star = candidates[has]
				testenv.Must(t, h.fill(s, nil, []flow{snat("remote:80", "node:*", "pod:4000")}))
				testenv.Must(t, h.setMovedTo(moved))
				p := s.packet(outgoing, false)
				if tc.ack {
					p.TCPFlags, p.Ack = testenv.ACK, podACK
				}
				if got := h.masqueradePacket(t, s, p); got != candidates[want] {
					t.Errorf("port is %d, want %d; candidates are %v", got, candidates[want], candidates)
				}
			}
			seen := epoch + ticks(tc.seen)
			t.Run(tc.name+" "+s.name, func(t *testing.T) { test(t, third, bpf.Moved{Seen: seen}) })
			t.Run(tc.name+" "+s.name+" far", func(t *testing.T) { test(t, ninth, bpf.Moved{Seen: longAhead, SeenFar: seen}) })
		}
	}
}

// TestMovedFlowsLast has replies alone to a flow that has its third candidate. It is still found there.
func TestMovedFlowsLast(t *testing.T) {
	h := newHost(t)
	defer h.setMoved(longAhead)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		candidates := h.candidates(t, s, outgoing)
		testenv.Must(t, h.reset())
		for _, s.star = range candidates[:2] {
			testenv.Must(t, h.fill(s, nil, []flow{snat("remote:80", "node:*", "pod2:1")}))
		}
		if s.star = h.masquerade(t, s, outgoing); s.star != candidates[2] {
			t.Fatalf("port is %d, want %d", s.star, candidates[2])
		}
		key, _ := snat("remote:80", "node:*", "pod:4000").wire(s)
		var entry bpf.Flow
		testenv.Must(t, h.flows().Lookup(key, &entry))
		entry.LastSeen = ticks(10 * time.Second)
		testenv.Must(t, h.flows().Put(key, entry))
		testenv.Must(t, h.setMoved(0))
		reply := s.packet("remote:80 > node:*", true)
		copy(reply.DstMAC[:], h.uplink.HardwareAddr)
		if _, _, err := h.runInside(bpf.ProgFromUplink, reply.MustBuild()); err != nil {
			t.Fatal(err)
		}
		if got := h.moved(t); got != 1 {
			t.Errorf("%d flows are noted after a reply, want 1", got)
		}
	})
}

// moved returns the number of places in moved_flows at which flows have been seen.
func (h *host) moved(t *testing.T) (n int) {
	t.Helper()
	all, err := contents[uint32, bpf.Moved](h.programs.Maps[bpf.MapMovedFlows])
	testenv.Must(t, err)
	for _, moved := range all {
		if moved.Seen != 0 {
			n++
		}
	}
	return n
}

// TestClientPortIsKept has a client use a pod by two addresses. The pod sees another port for the second, also once the
// first is free again: a note tells.
func TestClientPortIsKept(t *testing.T) {
	h := newHost(t)
	defer h.setMoved(longAhead)
	eachScene(t, []proto{tcp, udp}, func(t *testing.T, s scene) {
		first := dnat("remote:5000", "pod:80", "node2:8080").established()
		err := errors.Join(h.reset(), h.setMoved(0), h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, []flow{first}))
		testenv.Must(t, err)
		clientPort := func() uint16 {
			t.Helper()
			p := s.packet("remote:5000 > node:8080", false)
			isSegment(&p)
			copy(p.DstMAC[:], h.uplink.HardwareAddr)
			_, result, err := h.runInside(bpf.ProgFromUplink, p.MustBuild())
			testenv.Must(t, err)
			if p, err = testenv.Decode(result); err != nil {
				t.Fatal(err)
			}
			return s.sourcePort(p)
		}
		port := clientPort()
		if port == 5000 || h.moved(t) != 1 {
			t.Fatalf("port is %d, and %d flows are noted; want another port than 5000, and one note", port, h.moved(t))
		}
		key, _ := first.wire(s)
		testenv.Must(t, h.flows().Delete(key))
		if got := clientPort(); got != port {
			t.Errorf("port is %d, want %d as before", got, port)
		}
		testenv.Must(t, h.setMoved(0))
		if got := clientPort(); got != 5000 {
			t.Errorf("port without a note is %d, want 5000", got)
		}
	})
}
