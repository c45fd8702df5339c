package prog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// queueRows are packets whose fragments must not overtake the first one.
var queueRows = []fragmentRow{
	{
		name: "to a host port", program: bpf.ProgFromUplink, on: withPorts, ports: []hostPort{{host: "any:8080", to: "pod2:80"}},
		in: "remote:5000 > node:8080", out: "remote:5000 > pod2:80",
	},
	{
		name: "a reply", program: bpf.ProgFromUplink, reply: true,
		flows: []flow{snat("remote:80", "node:20000", "pod:4000")}, in: "remote:80 > node:20000", out: "remote:80 > pod:4000",
	},
	{
		name: "a reply without ports", program: bpf.ProgFromUplink, on: withoutPorts,
		flows: []flow{snat("remote:0", "node:0", "pod:0")}, in: "remote:0 > node:0", out: "remote:0 > pod:0",
	},
	{name: "to the host", program: bpf.ProgFromUplink, in: "remote:5000 > node:8081", out: "remote:5000 > node:8081"},
	{name: "masqueraded", program: bpf.ProgToUplink, in: outgoing, out: "node:* > remote:80"},
	{
		name: "from a pod to a host port", program: bpf.ProgFromContainer, on: withPorts, ports: []hostPort{{host: "any:8080", to: "pod2:80"}},
		in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
	},
	{
		name: "a hairpin reply", program: bpf.ProgFromContainer, on: withPorts, reply: true,
		flows: hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80"), in: "pod2:80 > podgw:20000", out: "node:8080 > pod:5000", redirect: true,
	},
	{name: "from a pod to the host", program: bpf.ProgFromContainer, in: "pod:5000 > node:8081", out: "pod:5000 > node:8081"},
}

// TestEarlyFragments sends fragments before the first one. They are queued, and sent again
// behind the first one, which itself goes through the hook a second time.
func TestEarlyFragments(t *testing.T) {
	h := newHost(t)
	for _, r := range queueRows {
		wire := h.capture(t, r.program)
		for _, s := range (row{on: r.on}).scenes() {
			for name, order := range map[string][]int{
				"the last one": {3, 0}, "the next one": {1, 0}, "all in reverse": {3, 2, 1, 0},
				"one twice": {2, 2, 1, 0}, "one of two": {2, 0, 1, 3},
			} {
				t.Run(r.name+" "+name+" "+s.name+" "+string(s.proto), func(t *testing.T) {
					err := errors.Join(h.reset(), h.fill(s, r.ports, r.flows), h.sendEarly(s, r, order, wire))
					testenv.NoError(t, err)
				})
			}
		}
	}
}

// sendEarly sends fragments up to the first one, expects them to be sent again, and sends
// these and the rest.
func (h *host) sendEarly(s scene, r fragmentRow, order []int, wire *capture) error {
	frames, err := h.cutUp(r.program, s, r.in, r, 99)
	if err != nil {
		return err
	}
	first := slices.Index(order, 0)
	for _, i := range order[:first+1] {
		verdict, result, err := h.runInside(r.program, frames[i])
		if err := errors.Join(err, checkVerdict(verdict, verdictDrop), h.checkCounters("", 0)); err != nil {
			return fmt.Errorf("fragment %d: %w", i, err)
		}
		if i != 0 && string(result) != string(frames[i]) {
			return fmt.Errorf("fragment %d changed to %x", i, result)
		}
		queued, err := contents[bpf.FragQueueKey, bpf.QueuedFrag](h.programs.Maps[bpf.MapFragQueue])
		if err != nil || i != 0 && !isQueued(queued, frames[i]) || i == 0 && len(queued) != 0 {
			return fmt.Errorf("after fragment %d, %d are queued: %w", i, len(queued), err)
		}
	}
	again := append([]int{0}, order[:first]...) // small fragments in the order of their arrival
	var sent [][]byte
	for _, i := range again {
		sent = append(sent, frames[i])
	}
	if err := wire.expect(sent); err != nil {
		return err
	}
	return h.inTurn(s, r, 99, append(again, order[first+1:]...)...)
}

func isQueued(queued map[bpf.FragQueueKey]bpf.QueuedFrag, frame []byte) bool {
	for _, entry := range queued {
		if string(entry.Frame[:entry.Len]) == string(frame) {
			return true
		}
	}
	return false
}

// capture receives all frames on the device of a program, in either direction.
type capture struct{ fd int }

func (h *host) capture(t *testing.T, program string) *capture {
	t.Helper()
	var c capture
	all := int(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL)))
	err := h.Do(func() (err error) {
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		timeout := unix.NsecToTimeval(int64(50 * time.Millisecond))
		return errors.Join(
			unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: uint16(all), Ifindex: h.device(program).Index}),
			unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout),
		)
	})
	testenv.Must(t, err)
	t.Cleanup(func() { unix.Close(c.fd) })
	return &c
}

// expect wants these frames in this order, each once. Other frames may come in between.
func (c *capture) expect(frames [][]byte) error {
	buf := make([]byte, 1<<16)
	got := 0
	for deadline := time.Now().Add(testenv.Timeout); time.Now().Before(deadline); {
		flags := 0
		if got == len(frames) {
			flags = unix.MSG_DONTWAIT
		}
		n, _, err := unix.Recvfrom(c.fd, buf, flags)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			if got == len(frames) {
				return nil
			}
		case err != nil:
			return err
		default:
			if got < len(frames) && string(frames[got]) == string(buf[:n]) {
				got++
				continue
			}
			if i := slices.IndexFunc(frames, func(f []byte) bool { return string(f) == string(buf[:n]) }); i >= 0 {
				return fmt.Errorf("frame %d came after %d of %d: %x", i, got, len(frames), buf[:n])
			}
		}
	}
	return fmt.Errorf("%d of %d queued frames were sent again, and other frames keep coming", got, len(frames))
}

// TestFragmentsNotQueued has fragments larger than the map's values, and others that are not ours.
func TestFragmentsNotQueued(t *testing.T) {
	const maxLen = 1600 // FRAG_QUEUE_MAX_LEN
	h := newHost(t)
	for _, tc := range []struct {
		program, in  string
		length       int
		queued       bool
		drop         string
		broadcasting bool
	}{
		{program: bpf.ProgFromUplink, in: "remote:5000 > node:8080", length: maxLen, queued: true},
		{program: bpf.ProgFromUplink, in: "remote:5000 > node:8080", length: maxLen + 1},
		{program: bpf.ProgFromUplink, in: "remote:5000 > node:8080", length: 200, broadcasting: true},
		{program: bpf.ProgFromUplinkL3, in: "remote:5000 > node:8080", length: maxLen, queued: true},
		{program: bpf.ProgFromUplinkL3, in: "remote:5000 > node:8080", length: maxLen + 1},
		{program: bpf.ProgToUplinkL3, in: outgoing, length: maxLen, queued: true},
		{program: bpf.ProgToUplinkL3, in: outgoing, length: maxLen + 1, drop: "fragment"},
		{program: bpf.ProgToUplink, in: outgoing, length: maxLen, queued: true},
		{program: bpf.ProgToUplink, in: outgoing, length: maxLen + 1, drop: "fragment"},
		{program: bpf.ProgToUplink, in: "plain:4000 > remote:80", length: 200},
		{program: bpf.ProgToUplink, in: "pod:4000 > multicast:80", length: 200},
		{program: bpf.ProgToUplink, in: "node:4000 > remote:80", length: 200},
		{program: bpf.ProgFromContainer, in: outgoing, length: 200},
		{program: bpf.ProgToLoopback, in: "loopback:5000 > loopback:8080", length: 200},
	} {
		for _, s := range (row{on: []proto{udp}}).scenes() {
			t.Run(fmt.Sprintf("%s %s %d %s", tc.program, tc.in, tc.length, s.name), func(t *testing.T) {
				p := s.packet(tc.in, false)
				p.Fragmented, p.FragOffset, p.IPID = true, 1480, 99
				header := s.headerLen()
				if s.name == "v6" {
					header += 8
				}
				adapt(tc.program, &p)
				header += len(p.Options)
				if isL3(tc.program) {
					header -= etherLen
				}
				p.Payload = string(make([]byte, tc.length-header))
				copy(p.DstMAC[:], h.device(tc.program).HardwareAddr)
				if tc.broadcasting {
					p.DstMAC = testenv.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
				}
				testenv.Must(t, h.reset())
				frame, want := p.MustBuild(), row{drop: tc.drop}
				verdict, result, err := h.runInside(tc.program, frame)
				if tc.queued {
					want.drop = "no reason"
				}
				testenv.NoError(t, errors.Join(err, checkVerdict(verdict, want.verdict()), h.checkCounters(tc.drop, tc.length)))
				if string(result) != string(frame) {
					t.Errorf("changed to %x", result)
				}
				queued, err := contents[bpf.FragQueueKey, bpf.QueuedFrag](h.programs.Maps[bpf.MapFragQueue])
				if err != nil || isQueued(queued, frame[len(frame)-tc.length:]) != tc.queued {
					t.Errorf("%d are queued: %v", len(queued), err)
				}
			})
		}
	}
}

// TestFragmentIDReused has an entry of a former packet with the same id. Once it has expired, a
// later fragment waits for its own first one.
func TestFragmentIDReused(t *testing.T) {
	h := newHost(t)
	for _, r := range queueRows {
		for _, s := range (row{on: r.on}).scenes() {
			t.Run(r.name+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				testenv.Must(t, errors.Join(h.reset(), h.fill(s, r.ports, r.flows)))
				frames, err := h.cutUp(r.program, s, r.in, r, 99)
				testenv.Must(t, err)
				later := func() error {
					_, result, err := h.runInside(r.program, frames[1])
					queued, errRead := contents[bpf.FragQueueKey, bpf.QueuedFrag](h.programs.Maps[bpf.MapFragQueue])
					if err := errors.Join(err, errRead); err != nil {
						return err
					}
					if !isQueued(queued, frames[1]) {
						return fmt.Errorf("not queued, but sent as %x", result)
					}
					return nil
				}
				if err := later(); err != nil { // makes the key
					t.Fatal(err)
				}
				former := map[bool]bpf.Fragment{
					false: {Sport: 1, Dport: 2, HasPorts: 1},
					true:  {Unreadable: 1},
				}
				for _, value := range former {
					for age, want := range map[time.Duration]bool{10 * time.Second: false, 40 * time.Second: true} {
						value.LastSeen = ticks(age)
						testenv.Must(t, h.putFragment(value))
						testenv.Must(t, empty[bpf.FragQueueKey, bpf.QueuedFrag](h.programs.Maps[bpf.MapFragQueue]))
						if err := later(); (err == nil) != want {
							t.Errorf("%s after %+v: queued is %t, want %t: %v", age, value, err == nil, want, err)
						}
					}
				}
			})
		}
	}
}

// putFragment replaces the value of the only entry in fragments.
func (h *host) putFragment(value bpf.Fragment) error {
	m := h.programs.Maps[bpf.MapFragments]
	var key bpf.FragmentKey
	if err := m.NextKey(nil, &key); err != nil {
		return err
	}
	return m.Put(&key, &value)
}

// TestFirstFragmentTooLargeToQueue has devices with jumbo frames. The short last fragment comes
// first and is queued; the first one would be too large for the queue, and is sent on.
func TestFirstFragmentTooLargeToQueue(t *testing.T) {
	h := newHost(t)
	links, err := rtnl.Links(h.Netlink())
	testenv.Must(t, err)
	for _, link := range links { // helpers of Linux 5.10 compare a packet with its MTU
		testenv.Must(t, h.Netlink().LinkSetMTU(link, 9000))
	}
	for _, r := range queueRows {
		wire := h.capture(t, r.program)
		for _, s := range (row{on: r.on}).scenes() {
			t.Run(r.name+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				p := s.packet(r.in, r.reply)
				p.Payload = strings.Repeat("x", 1900)
				copy(p.DstMAC[:], h.device(r.program).HardwareAddr)
				adapt(r.program, &p)
				frames, err := testenv.Fragment(p.MustBuild(), 1800, 99)
				testenv.Must(t, errors.Join(err, h.reset(), h.fill(s, r.ports, r.flows)))
				for _, i := range []int{1, 0} {
					verdict, _, err := h.runInside(r.program, frames[i])
					if err := errors.Join(err, checkVerdict(verdict, verdictDrop), h.checkCounters("", 0)); err != nil {
						t.Fatalf("fragment %d: %v", i, err)
					}
				}
				testenv.NoError(t, wire.expect(frames))
			})
		}
	}
}
