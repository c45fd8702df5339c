package prog

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Two CPUs send packets of a connection while its offload begins.

// enter runs the ingress hook on a packet, of the pod's or from the outside.
func (h *cacheHost) enter(s scene, text string, verdict uint32, edit func(*testenv.Packet)) error {
	if strings.HasPrefix(text, "pod") {
		return h.wantSent(s, "pod", text, verdict, edit)
	}
	p := h.packet(s, "pod", text)
	edit(&p)
	_, got, err := h.transit(bpf.ProgFromUplink, p)
	if err = errors.Join(err, checkVerdict(got, verdict)); err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	return nil
}

// delivers runs the last hook on a packet that the stack has delivered.
func (h *cacheHost) delivers(text string, sent outcome) error {
	from, to, _ := strings.Cut(text, " > ")
	deviceOf := func(side string) *netlink.LinkAttrs {
		name, _, _ := strings.Cut(side, ":")
		return cmp.Or(h.devices[name], h.uplink)
	}
	program := bpf.ProgToContainer
	if deviceOf(to) == h.uplink {
		program = bpf.ProgToUplink
		copy(sent.frame, []byte{2, 0, 0, 0, 0, 9}) // the next hop by the routing table
	}
	verdict, _, err := h.runAt(program, deviceOf(to), deviceOf(from), sent)
	return errors.Join(err, checkVerdict(verdict, verdictNext))
}

// observes has the last hook record that the stack has delivered a packet.
func (h *cacheHost) observes(s scene, text string) error {
	p := h.packet(s, "pod", text)
	return h.delivers(text, outcome{tag: s.tag(p) | tagObserve, frame: p.MustBuild()})
}

func withSeq(seq uint32) func(*testenv.Packet) { return func(p *testenv.Packet) { p.Seq = seq } }

// What the stack delivers after another CPU's delivery of the same side has been recorded is recorded, too, though its ingress
// hook has not asked for that.
func TestOffloadRecordsWhatIsOnItsWay(t *testing.T) {
	testenv.Require(t, ingressDevice)
	testenv.Require(t, twoCPUs)
	h := newCacheHost(t)
	for _, c := range []struct {
		sent, first string // what the other CPU delivers
		states      bpf.OffloadState
		end         uint32 // of the pod's data in conntrack
	}{
		{forth, forth, 2 * bpf.OffloadDelivered, 2000 + uint32(len("payload"))},
		{forth, back, bpf.OffloadDelivered, podACK},
		{forth, "", 0, 0},
		{"pod:4000 > remote:80", "pod:4000 > remote:80", 2 * bpf.OffloadDelivered, 2000 + uint32(len("payload"))},
	} {
		eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
			testenv.Must(t, h.start(s, bpf.FastPathEstablished))
			testenv.Must(t, h.on(1, func() error {
				sent, err := h.send(s, "pod", c.sent, withSeq(2000))
				if err != nil || sent.verdict != verdictNext || sent.observed() {
					return fmt.Errorf("sent with verdict %d, noted %v: %w", int32(sent.verdict), sent.observed(), err)
				}
				if c.first != "" {
					err = h.on(0, func() error { return h.observes(s, c.first) })
				}
				return errors.Join(err, h.delivers(c.sent, sent))
			}))
			got, _, err := h.known(s)
			if err != nil || got.State != c.states || got.CtAck[0] != c.end {
				t.Errorf("%s after %q: state %#x, data up to %d; want %#x, %d (%v)", c.sent, c.first, got.State, got.CtAck[0], c.states, c.end, err)
			}
		})
	}
}

// updates returns the numbers at the end of at least count conntrack updates: no other TCP comes to the device.
func (c *capture) updates(count int) (ends []uint32) {
	buf := make([]byte, 1<<16)
	for deadline := time.Now().Add(5 * time.Second); ; {
		n, _, err := unix.Recvfrom(c.fd, buf, 0)
		if errors.Is(err, unix.EAGAIN) && (len(ends) >= count || time.Now().After(deadline)) {
			return ends
		}
		if p, decodeErr := testenv.Decode(buf[:max(n, 0)]); err == nil && decodeErr == nil && p.Proto == unix.IPPROTO_TCP {
			ends = append(ends, p.Seq+uint32(len(p.Payload)))
		}
	}
}

// The first packet of a side that bypasses the stack is data that conntrack has not seen. Conntrack gets its number, of each
// CPU's first.
func TestOffloadBeginsWithAnUpdate(t *testing.T) {
	testenv.Require(t, twoCPUs)
	h := newCacheHost(t)
	const end = 3000 // of the side's data in conntrack
	for _, side := range []struct {
		text  string
		known offload
		wire  *capture
	}{{forth, podToPod, h.capture(t, bpf.ProgFromContainer)}, {"remote:5000 > pod:80", outsideToPod, h.capture(t, bpf.ProgFromUplink)}} {
		for _, c := range []struct {
			name    string
			seqs    [2]uint32 // on the two CPUs
			again   bool      // the second CPU has not seen what the first has recorded
			updates []uint32
			end     uint32
			slow    uint8
		}{
			{"in turn", [2]uint32{end, end + 100}, false, []uint32{end}, end, 0},
			{"at once", [2]uint32{end, end + 100}, true, []uint32{end, end + 100}, end + 100, 0},
			{"retransmissions", [2]uint32{end - 100, end - 1}, false, nil, end, 1},
			{"a retransmission, and new data", [2]uint32{end - 100, end + 100}, false, []uint32{end + 100}, end + 100, 0},
		} {
			eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
				err := h.start(s, bpf.FastPathEstablished)
				known := side.known
				for cpu, seq := range c.seqs {
					if known.slow = []uint32{end, c.seqs[0]}[cpu]; cpu == 0 || c.again {
						err = errors.Join(err, h.offload(s, known))
					}
					err = errors.Join(err, h.on(cpu, func() error { return h.enter(s, side.text, verdictRedirect, withSeq(seq)) }))
				}
				testenv.Must(t, err)
				updates := side.wire.updates(len(c.updates))
				got, _, err := h.known(s)
				if err != nil || !slices.Equal(updates, c.updates) || got.CtAck[0] != c.end || got.Slow[1] != c.slow {
					t.Errorf("%s, %s: updates %d, data up to %d, slow %d; want %d, %d, %d (%v)",
						side.text, c.name, updates, got.CtAck[0], got.Slow[1], c.updates, c.end, c.slow, err)
				}
			})
		}
	}
}

// openings are first packets of a side, of connections that are offloaded.
var openings = []struct {
	in, out string // before and after the plugin's translation
	flags   uint8
	known   offload
	other   bpf.OffloadState // the other side's delivery
}{
	{forth, forth, syn, podToPod, 1},
	{"pod:4000 > remote:80", "pod:4000 > remote:80", syn, podToOutside, 1},
	{"remote:5000 > pod:80", "remote:5000 > pod:80", syn, outsideToPod, 1},
	{"remote:5000 > node:8080", "remote:5000 > pod:80", syn, outsideToPod, 1},
	{"remote:80 > node:20000", "remote:80 > pod:4000", synack, podToOutside, 2},
}

// startOpenings starts with what translates openings.
func (h *cacheHost) startOpenings(s scene) error {
	ports, flows := []hostPort{{host: "any:8080", to: "pod:80"}}, []flow{snat("remote:80", "node:20000", "pod:4000").with(replied)}
	return errors.Join(h.start(s, bpf.FastPathEstablished), h.fill(s, ports, flows))
}

// A CPU that has seen a connection open does not leave it to the stack once another one has had it offloaded.
func TestOffloadHoldsWhereItHasOpened(t *testing.T) {
	testenv.Require(t, ingressDevice)
	testenv.Require(t, twoCPUs)
	h := newCacheHost(t)
	for _, c := range openings {
		eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
			testenv.Must(t, h.startOpenings(s))
			testenv.NoError(t, h.on(1, func() error {
				return errors.Join(h.enter(s, c.in, verdictNext, flags(c.flags)), h.enter(s, c.in, verdictNext, flags(ack)),
					h.offload(s, c.known.state(c.other)), h.on(0, func() error { return h.observes(s, c.out) }), h.wantKnown(s, both),
					h.enter(s, c.in, verdictRedirect, flags(ack)))
			}))
		})
	}
}

// A CPU that has forwarded a connection past the stack does not do so with the tuple's next one, of which another CPU has seen the
// beginning: neither once the stack has delivered a packet of it, nor once the other CPU has forwarded one past the stack.
func TestOffloadEndsWhereItHasNotReopened(t *testing.T) {
	testenv.Require(t, ingressDevice)
	testenv.Require(t, twoCPUs)
	h := newCacheHost(t)
	for _, c := range openings {
		eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
			enter := func(verdict uint32, flag uint8) error { return h.enter(s, c.in, verdict, flags(flag)) }
			none := func() error { return h.offload(s, c.known.state(0)) }
			for name, next := range map[string]func() error{
				"delivered": func() error { return errors.Join(none(), h.observes(s, c.out)) },
				"bypasses":  func() error { return errors.Join(enter(verdictRedirect, ack), none()) },
			} {
				testenv.Must(t, errors.Join(h.startOpenings(s), h.offload(s, c.known)))
				testenv.Must(t, h.on(1, func() error { return enter(verdictRedirect, ack) }))
				testenv.Must(t, h.on(0, func() error { return errors.Join(enter(verdictNext, c.flags), next()) }))
				if err := h.on(1, func() error { return enter(verdictNext, ack) }); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}

// A remote's RST or FIN with another number than the expected one may be forged, so it is not the first packet of its side.
func TestOffloadDoesNotBeginWithAForgedEnd(t *testing.T) {
	h := newCacheHost(t)
	const end = 3000 // of the remote's data in conntrack
	for _, flag := range []uint8{testenv.RST, testenv.FIN | ack} {
		h.eachScene(t, []proto{tcp}, func(s scene) error {
			known := outsideToPod
			known.slow = end
			err := errors.Join(h.start(s, bpf.FastPathEstablished), h.offload(s, known),
				h.enter(s, "remote:5000 > pod:80", verdictRedirect, func(p *testenv.Packet) { p.Seq, p.TCPFlags = end+100, flag }))
			got, _, knownErr := h.known(s)
			if err = errors.Join(err, knownErr); err == nil && (got.Slow[1] != 1 || got.CtAck[0] != end) {
				err = fmt.Errorf("flags %#x: slow %d, data up to %d; want 1, %d", flag, got.Slow[1], got.CtAck[0], end)
			}
			return err
		})
	}
}
