package prog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// forever is a reader's time that no test outlives.
const forever = 1 << 62

// eventReader reads drop_events.
type eventReader struct {
	h    *host
	ring *ringbuf.Reader
}

func (h *host) newEventReader(t testing.TB) *eventReader {
	t.Helper()
	ring, err := ringbuf.NewReader(h.programs.Maps[bpf.MapDropEvents])
	testenv.Must(t, err)
	r := &eventReader{h, ring}
	ring.SetDeadline(time.Unix(1, 0))
	t.Cleanup(func() {
		testenv.NoError(t, errors.Join(r.enter(bpf.DropReader{}), ring.Close()))
	})
	return r
}

// enter makes the programs tell, from now on: nobody has left anything in the ring or used up its share.
func (r *eventReader) enter(state bpf.DropReader) error {
	_, err := r.read()
	limits := r.h.programs.Maps[bpf.MapDropLimits]
	for key := range limits.MaxEntries() {
		err = errors.Join(err, limits.Put(key, make([]bpf.DropLimit, ebpf.MustPossibleCPU())))
	}
	return errors.Join(err, r.h.programs.Maps[bpf.MapDropReader].Put(uint32(0), state))
}

// read returns all reported events.
func (r *eventReader) read() (events []bpf.DropEvent, err error) {
	for {
		record, err := r.ring.Read()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return events, nil
		}
		var event bpf.DropEvent
		if err == nil {
			err = binary.Read(bytes.NewReader(record.RawSample), binary.NativeEndian, &event)
		}
		if err != nil {
			return nil, err
		}
		events = append(events, event)
	}
}

// leftOut returns what was left out for a reason.
func (r *eventReader) leftOut(reason bpf.Reason) (n uint64, err error) {
	var perCPU []bpf.DropLimit
	err = r.h.programs.Maps[bpf.MapDropLimits].Lookup(uint32(reason), &perCPU)
	for _, limit := range perCPU {
		n += limit.LeftOut
	}
	return n, err
}

// TestDropEvents drops a pod's forged packet for readers of several kinds, and for none.
func TestDropEvents(t *testing.T) {
	h := newHost(t)
	s := h.sender()
	frame := forged(s)
	everything := bpf.DropReader{Until: forever, Reasons: ^uint64(0), Limit: 100}
	of := func(owners ...uint64) bpf.DropReader {
		r := everything
		copy(r.Owner[:], owners)
		return r
	}
	for _, tc := range []struct {
		name   string
		reader bpf.DropReader
		sent   int
		told   int
		left   uint64
	}{
		{"no reader", bpf.DropReader{}, 3, 0, 0},
		{"a reader whose time is over", bpf.DropReader{Until: 1, Reasons: ^uint64(0), Limit: 100}, 3, 0, 0},
		{"everything", everything, 3, 3, 0},
		{"its reason", bpf.DropReader{Until: forever, Reasons: 1 << bpf.ReasonAddress, Limit: 100}, 3, 3, 0},
		{"another reason", bpf.DropReader{Until: forever, Reasons: ^uint64(1 << bpf.ReasonAddress), Limit: 100}, 3, 0, 0},
		{"beyond the limit", bpf.DropReader{Until: forever, Reasons: ^uint64(0), Limit: 2}, 5, 2, 3},
		{"a full ring", bpf.DropReader{Until: forever, Reasons: ^uint64(0), Limit: 5000}, 1000, 840, 160},
		{"its owner", of(owners["pod"]), 3, 3, 0},
		{"the owner of its source", of(owners["plain"], owners["pod2"]), 3, 3, 0},
		{"another owner", of(owners["pod3"]), 3, 0, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testenv.Must(t, h.guard(s, antiSpoof))
			r := h.newEventReader(t)
			testenv.Must(t, r.enter(tc.reader))
			err := h.on(0, func() error { return h.drop(frame, tc.sent) }) // since each CPU has a share of its own
			testenv.Must(t, err)
			events, err := r.read()
			left, errLeft := r.leftOut(bpf.ReasonAddress)
			if err := errors.Join(err, errLeft); err != nil || len(events) != tc.told || left != tc.left {
				t.Errorf("told %d and left out %d (%v), want %d and %d", len(events), left, err, tc.told, tc.left)
			}
			for _, e := range events {
				want := bpf.DropEvent{
					Time: e.Time, Owner: owners["pod"], Reason: uint32(bpf.ReasonAddress), Ifindex: uint32(h.veth.Index), Len: uint32(len(frame)),
					L3: etherLen, Captured: uint16(len(frame)), Protocol: 0x0008, IngressIfindex: e.IngressIfindex,
				}
				if copy(want.Bytes[:], frame); !bytes.Equal(e.Bytes[:e.Captured], frame) || withoutBytes(e) != withoutBytes(want) {
					t.Errorf("got %+v, want %+v", e, want)
				}
			}
			var after bpf.DropReader
			if err := h.programs.Maps[bpf.MapDropReader].Lookup(uint32(0), &after); err != nil || after.Until == 1 {
				t.Errorf("a reader is left whose time is over: %+v (%v)", after, err)
			}
		})
	}
}

// drop has the frame dropped a number of times.
func (h *host) drop(frame []byte, times int) error {
	for range times {
		verdict, _, err := h.run(bpf.ProgFromContainer, frame)
		if err := errors.Join(err, checkVerdict(verdict, verdictDrop)); err != nil {
			return err
		}
	}
	return nil
}

func withoutBytes(e bpf.DropEvent) bpf.DropEvent {
	e.Bytes = [256]uint8{}
	return e
}

// forged is a packet of the sender, in the name of its neighbor.
func forged(s testenv.Sender) []byte {
	all := s.Hostile()
	return all[slices.IndexFunc(all, func(f testenv.Frame) bool { return f.Name == "another container's IPv4 address" })].Bytes
}

// TestDropEventsOfRewrite has the kernel refuse to send a packet again, because its device is down. A fragment that
// waits, of any direction, is no drop.
func TestDropEventsOfRewrite(t *testing.T) {
	h := newHost(t)
	r := h.newEventReader(t)
	uplink := &netlink.Device{LinkAttrs: *h.uplink}
	t.Cleanup(func() {
		testenv.NoError(t, h.Netlink().LinkSetUp(uplink))
	})
	testenv.Must(t, errors.Join(h.reset(), r.enter(bpf.DropReader{Until: forever, Reasons: ^uint64(0), Limit: 100})))
	s := scene{addressing: v4, proto: udp}
	packet := s.packet("remote:5000 > node:8081", false)
	copy(packet.DstMAC[:], h.uplink.HardwareAddr)
	frames, err := testenv.Fragment(packet.MustBuild(), 8, 55)
	testenv.Must(t, err)
	waiting, err := testenv.Fragment(s.packet(outgoing, false).MustBuild(), 8, 55)
	testenv.Must(t, err)
	for program, frame := range map[string][]byte{bpf.ProgFromUplink: frames[1], bpf.ProgToUplink: waiting[1]} {
		verdict, _, err := h.runInside(program, frame)
		testenv.Must(t, errors.Join(err, checkVerdict(verdict, verdictDrop)))
	}
	testenv.Must(t, h.Netlink().LinkSetDown(uplink))
	verdict, _, err := h.runInside(bpf.ProgFromUplink, frames[0])
	testenv.NoError(t, errors.Join(err, checkVerdict(verdict, verdictDrop)))
	events, err := r.read()
	if err != nil || len(events) != 1 || bpf.Reason(events[0].Reason) != bpf.ReasonRewrite || events[0].Owner != 0 || events[0].Ifindex != uint32(h.uplink.Index) {
		t.Errorf("got %+v (%v), want one for %d on device %d", events, err, bpf.ReasonRewrite, h.uplink.Index)
	}
}
