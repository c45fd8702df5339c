package prog

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestQueuedFragmentsExpire queues a fragment for longer than a reassembly waits.
func TestQueuedFragmentsExpire(t *testing.T) {
	h := newHost(t)
	wire := h.capture(t, queueRows[0].program)
	queue := h.programs.Maps[bpf.MapFragQueue]
	r := queueRows[0]
	eachScene(t, r.on, func(t *testing.T, s scene) {
		frames, err := h.cutUp(r.program, s, r.in, r, 99)
		testenv.Must(t, errors.Join(err, h.reset(), h.fill(s, r.ports, r.flows)))
		for _, i := range []int{2, 1, 0} {
			if _, _, err := h.runInside(r.program, frames[i]); err != nil {
				t.Fatal(err)
			}
			if i != 2 {
				continue
			}
			testenv.Must(t, h.expireQueue())
		}
		testenv.NoError(t, wire.expect(frames[:2]))
		left, err := contents[bpf.FragQueueKey, bpf.QueuedFrag](queue)
		if err != nil || len(left) != 0 {
			t.Errorf("%d are still queued: %v", len(left), err)
		}
	})
}

// TestEarlyFragmentsFromPods sends fragments through two programs, as pods do. The second program
// has the queue, but the first one has seen the first fragment by then.
func TestEarlyFragmentsFromPods(t *testing.T) {
	h := newHost(t)
	wire := h.capture(t, bpf.ProgToUplink)
	r := fragmentRow{program: bpf.ProgToUplink, in: outgoing, out: "node:* > remote:80"}
	eachScene(t, nil, func(t *testing.T, s scene) {
		frames, err := h.cutUp(r.program, s, r.in, r, 99)
		testenv.Must(t, errors.Join(err, h.reset()))
		for _, i := range []int{2, 0} {
			verdict, _, err := h.runInside(bpf.ProgFromContainer, frames[i])
			if err := errors.Join(err, checkVerdict(verdict, verdictNext)); err != nil {
				t.Fatalf("from_container, fragment %d: %v", i, err)
			}
			verdict, _, err = h.runInside(bpf.ProgToUplink, frames[i])
			if err := errors.Join(err, checkVerdict(verdict, verdictDrop)); err != nil {
				t.Errorf("to_uplink, fragment %d: %v", i, err)
			}
		}
		testenv.NoError(t, wire.expect([][]byte{frames[0], frames[2]}))
	})
}

// TestFragmentsWithUnreadableFirst has packets whose first fragment has no ports, and is left to
// the stack. So must the others be.
func TestFragmentsWithUnreadableFirst(t *testing.T) {
	h := newHost(t)
	for name, tc := range map[string]struct {
		on    proto
		only  string
		first func(s scene, frame []byte) []byte
		all   func(s scene, frame []byte) []byte
	}{
		"the TCP header ends in the second fragment": {on: tcp, first: func(_ scene, f []byte) []byte { return f[:len(f)-8] }},
		"destination options": {on: udp, only: "v6", all: func(s scene, f []byte) []byte {
			f[s.headerLen()] = unix.IPPROTO_DSTOPTS
			return f
		}},
		"ICMP, neither echo nor error": {on: echo, first: func(s scene, f []byte) []byte {
			f[len(f)-fragmentSize] = 17 // neither echo nor error, in both families
			if s.name == "v6" {
				f[len(f)-fragmentSize] = 143
			}
			return f
		}},
	} {
		for _, s := range (row{on: []proto{tc.on}, only: tc.only}).scenes() {
			t.Run(name+" "+s.name, func(t *testing.T) {
				frames, err := h.cutUp(bpf.ProgFromUplink, s, "remote:5000 > node:8080", fragmentRow{}, 99)
				testenv.Must(t, errors.Join(err, h.reset()))
				for i, frame := range frames {
					if tc.first != nil && i == 0 {
						frame = tc.first(s, frame)
					}
					if tc.all != nil {
						frame = tc.all(s, frame)
					}
					verdict, result, err := h.runInside(bpf.ProgFromUplink, frame)
					if err := errors.Join(err, checkVerdict(verdict, verdictNext)); err != nil || !bytes.Equal(result, frame) {
						t.Errorf("fragment %d: %v", i, err)
					}
				}
			})
		}
	}
}

// TestPaddedFirstFragment has a frame that is longer than its packet, as Ethernet pads those of
// less than 60 bytes.
func TestPaddedFirstFragment(t *testing.T) {
	h := newHost(t)
	wire := h.capture(t, queueRows[0].program)
	s, r := scene{addressing: v4, proto: udp}, queueRows[0]
	frames, err := h.cutUp(r.program, s, r.in, r, 99)
	testenv.Must(t, errors.Join(err, h.reset(), h.fill(s, r.ports, r.flows)))
	frames[0] = slices.Concat(frames[0], make([]byte, 16))
	for _, i := range []int{1, 2, 0} {
		if _, _, err := h.runInside(r.program, frames[i]); err != nil {
			t.Fatal(err)
		}
	}
	testenv.NoError(t, wire.expect(frames[:3]))
}

// TestFragmentedICMPError has the first fragment of an ICMP error, whose quoted packet has the same
// addresses and id as another fragmented packet. The ports quoted must not become the latter's.
func TestFragmentedICMPError(t *testing.T) {
	h := newHost(t)
	eachScene(t, []proto{udp}, func(t *testing.T, s scene) {
		r := fragmentRow{program: bpf.ProgFromUplink}
		// With source and destination swapped, the quoted packet has the addresses of the
		// fragments, but other ports.
		packet, err := errorRow{}.buildError(s, "router", "node:9999 > remote:9998", errorKinds[s.name][0], 8)
		testenv.Must(t, err)
		copy(packet.DstMAC[:], h.uplink.HardwareAddr)
		packet.Fragmented, packet.MoreFragments, packet.IPID = true, true, 99
		frames, err := h.cutUp(r.program, s, "remote:5000 > node:8080", r, 99)
		testenv.Must(t, errors.Join(err, h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod2:80"}}, nil)))
		want, err := h.cutUp(r.program, s, "remote:5000 > pod2:80", r, 99)
		testenv.Must(t, err)
		for i, frame := range [][]byte{frames[0], packet.MustBuild(), frames[1]} {
			_, result, err := h.runInside(r.program, frame)
			testenv.Must(t, err)
			if i == 2 && !bytes.Equal(result, want[1]) {
				t.Errorf("the next fragment is %x, want %x", result, want[1])
			}
		}
	})
}

// TestFragmentedErrorToTheHost has an ICMP error that is longer than one packet. It is not translated,
// so all its fragments go to the stack.
func TestFragmentedErrorToTheHost(t *testing.T) {
	h := newHost(t)
	wire := h.capture(t, bpf.ProgFromUplink)
	for _, s := range (row{on: []proto{udp}}).scenes() {
		long := errorRow{edit: func(p *testenv.Packet) { p.Payload = strings.Repeat("x", 64) }}
		packet, err := long.buildError(s, "router", "node:9999 > remote:9998", errorKinds[s.name][0], 64)
		testenv.Must(t, err)
		packet.Dst = s.addr("node")
		copy(packet.DstMAC[:], h.uplink.HardwareAddr)
		frames, err := testenv.Fragment(packet.MustBuild(), 72, 99)
		if err != nil || len(frames) != 2 {
			t.Fatalf("%d fragments: %v", len(frames), err)
		}
		for name, tc := range map[string]struct {
			order    []int
			verdicts []uint32
		}{
			"in order": {[]int{0, 1}, []uint32{verdictNext, verdictNext}},
			"reversed": {[]int{1, 0}, []uint32{verdictDrop, verdictDrop}},
		} {
			t.Run(s.name+" "+name, func(t *testing.T) {
				testenv.Must(t, h.reset())
				for n, i := range tc.order {
					verdict, _, err := h.runInside(bpf.ProgFromUplink, frames[i])
					if err := errors.Join(err, checkVerdict(verdict, tc.verdicts[n]), h.checkCounters("", 0)); err != nil {
						t.Errorf("fragment %d: %v", i, err)
					}
				}
				if tc.verdicts[0] != verdictDrop {
					return
				}
				testenv.NoError(t, wire.expect(frames))
			})
		}
	}
}

// TestFragmentQueuePlaces sends more fragments of a packet than may wait, overlapping ones among them.
// What waits is sent once, and what has expired makes room.
func TestFragmentQueuePlaces(t *testing.T) {
	const places = 128 // FRAG_QUEUE_PLACES
	h := newHost(t)
	queue := h.programs.Maps[bpf.MapFragQueue]
	for _, r := range queueRows {
		if r.on != nil && !slices.Contains(r.on, udp) {
			continue
		}
		wire := h.capture(t, r.program)
		for _, f := range addressings {
			t.Run(r.name+" "+f.name, func(t *testing.T) {
				s := scene{addressing: f, proto: udp}
				frames, err := h.cutUp(r.program, s, r.in, r, 99)
				testenv.Must(t, errors.Join(err, h.reset(), h.fill(s, r.ports, r.flows)))
				sent := frames[:1]
				for i := range places {
					testenv.Must(t, h.queues(r.program, frames[1+i%2], i+1))
					sent = append(slices.Clip(sent), frames[1+i%2])
				}
				if err := h.queues(r.program, frames[2], places); err != nil {
					t.Fatal("one more:", err)
				}
				if _, _, err := h.runInside(r.program, frames[0]); err != nil {
					t.Fatal(err)
				}
				testenv.NoError(t, wire.expect(sent))
				// Of another packet with the same id.
				testenv.NoError(t, errors.Join(
					empty[bpf.FragmentKey, bpf.Fragment](h.programs.Maps[bpf.MapFragments]),
					h.queues(r.program, frames[1], 1), h.expireQueue(), h.queues(r.program, frames[1], 1)))
			})
		}
		testenv.Must(t, empty[bpf.FragQueueKey, bpf.QueuedFrag](queue))
	}
}

// queues runs a program on a fragment, and compares the number of fragments that wait afterwards.
func (h *host) queues(program string, frame []byte, want int) error {
	_, _, err := h.runInside(program, frame)
	waiting, errRead := contents[bpf.FragQueueKey, bpf.QueuedFrag](h.programs.Maps[bpf.MapFragQueue])
	if len(waiting) != want {
		err = errors.Join(err, fmt.Errorf("%d fragments wait, want %d", len(waiting), want))
	}
	return errors.Join(err, errRead)
}

// expireQueue makes all fragments that wait older than a reassembly waits.
func (h *host) expireQueue() error {
	queue := h.programs.Maps[bpf.MapFragQueue]
	entries, err := contents[bpf.FragQueueKey, bpf.QueuedFrag](queue)
	for key, entry := range entries {
		entry.LastSeen = ticks(40 * time.Second)
		err = errors.Join(err, queue.Put(&key, &entry))
	}
	return err
}
