package prog

import (
	"errors"
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// leave sends a packet of the pod's to the outside: by from_container, and by to_uplink if that has not translated it.
func (h *cacheHost) leave(s scene, flags uint8, seq, ack uint32) error {
	sent, err := h.send(s, "pod", "pod:4000 > remote:80", func(p *testenv.Packet) {
		p.TCPFlags, p.Seq, p.Ack, p.Payload = flags, seq, ack, ""
	})
	if err != nil || sent.tag == tagTranslated {
		return err
	}
	copy(sent.frame, []byte{2, 0, 0, 0, 0, 9}) // the next hop
	verdict, _, err := h.runAt(bpf.ProgToUplink, h.veth, h.veth, sent)
	return errors.Join(err, checkVerdict(verdict, verdictNext))
}

// arrive sends a packet in the name of the remote to the port that the pod is masqueraded with.
func (h *cacheHost) arrive(s scene, flags uint8, seq, ack uint32) error {
	p := s.packet("remote:80 > node:*", false)
	p.TCPFlags, p.Seq, p.Ack, p.Payload = flags, seq, ack, ""
	copy(p.DstMAC[:], h.uplink.HardwareAddr)
	_, _, err := h.run(bpf.ProgFromUplink, p.MustBuild())
	return err
}

// handshake opens the connection of the pod's to remote, and sets s.star to its port.
func (h *cacheHost) handshake(s *scene) error {
	if err := errors.Join(h.leave(*s, syn, 1000, 0)); err != nil {
		return err
	}
	all, err := h.flows().all()
	for key := range all {
		s.star = key.LocalPort
	}
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("%d flows, want 1", len(all))
	}
	return errors.Join(err, h.arrive(*s, synack, 5000, 1001), h.leave(*s, ack, 1001, 5001))
}

// The number with which a remote ends a connection is what the pod has acknowledged last: by a packet that the
// forwarding cache of another CPU has forwarded, or that to_uplink has seen.
func TestEndNumbersAcrossCPUs(t *testing.T) {
	testenv.Require(t, ingressDevice)
	testenv.Require(t, twoCPUs)
	h := newCacheHost(t)
	const est = bpf.FlowEstablished
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		for _, tc := range []struct {
			name string
			then func(s *scene) error // on the first CPU, after the handshake
			end  segment              // on the second
		}{
			{"RST behind what the cache has forwarded", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 5100), h.leave(*s, ack, 1001, 6000))
			}, remote(rst, 6000, 0, bpf.FlowClose, replied)},
			{"FIN behind what the cache has forwarded", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 5100), h.leave(*s, ack, 1001, 6000))
			}, remote(finack, 6000, 1001, est, replied|unackedFIN)},
			{"RST with a number before", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 5100), h.leave(*s, ack, 1001, 6000))
			}, remote(rst, 5999, 0, est, replied|unknownRST)},
			{"RST with a number behind", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 5100), h.leave(*s, ack, 1001, 6000))
			}, remote(rst, 6001, 0, est, replied|unknownRST)},
			{"RST with the number of the handshake", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 5100), h.leave(*s, ack, 1001, 6000))
			}, remote(rst, 5001, 0, est, replied|unknownRST)},
			{"RST behind the pod's FIN, which to_uplink has seen", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 6000), h.leave(*s, finack, 1001, 7000))
			}, remote(rst, 7000, 0, bpf.FlowClose, replied|hasFIN)},
			{"RST behind data that the pod has not acknowledged yet", func(s *scene) error {
				return errors.Join(h.arrive(*s, ack, 5001, 1001), h.leave(*s, ack, 1001, 5001),
					h.arrive(*s, ack, 5001+100, 1001), h.arrive(*s, ack, 5001+200, 1001))
			}, remote(rst, 5001+200, 0, bpf.FlowClose, replied)},
			{"RST behind data, and another packet in the remote's name", func(s *scene) error {
				err := errors.Join(h.arrive(*s, ack, 5001, 1001), h.leave(*s, ack, 1001, 5001), h.arrive(*s, ack, 5001+100, 1001))
				forged := h.on(1, func() error { return h.arrive(*s, ack, 5001+1<<30, 1001) })
				return errors.Join(err, forged, h.arrive(*s, ack, 5001+200, 1001))
			}, remote(rst, 5001+200, 0, bpf.FlowClose, replied)},
			{"RST after a forged one", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 5100), h.leave(*s, ack, 1001, 6000), h.arrive(*s, rst, 1<<30, 0))
			}, remote(rst, 6000, 0, bpf.FlowClose, replied|unknownRST)},
			{"RST of a new connection on the same ports", func(s *scene) error {
				return errors.Join(h.leave(*s, ack, 1001, 6000), h.leave(*s, rst, 1001, 0),
					h.leave(*s, syn, 3000, 0), h.arrive(*s, synack, 1<<31, 3001), h.leave(*s, finack, 3001, 1<<31+1))
			}, remote(rst, 1<<31+1, 0, bpf.FlowClose, replied|hasFIN)},
		} {
			t.Run(s.name+" "+tc.name, func(t *testing.T) {
				conn := s
				var got bpf.Flow
				err := h.on(0, func() error {
					return errors.Join(h.start(s, always), h.handshake(&conn), tc.then(&conn))
				})
				err = errors.Join(err, h.on(1, func() error { return h.arrive(conn, tc.end.tcp, tc.end.seq, tc.end.ack) }))
				got, flowErr := h.onlyFlow()
				testenv.Must(t, errors.Join(err, flowErr))
				if got.State != tc.end.state || got.Flags != tc.end.flags {
					t.Errorf("state is %d with flags %#x, want %d with %#x", got.State, got.Flags, tc.end.state, tc.end.flags)
				}
			})
		}
	}
}

// A new connection is ended by its own numbers, whatever a former one on the same ports has acknowledged, also if that number
// has decided about a RST.
func TestEndNumbersOfNewConnection(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			err := h.on(0, func() error {
				return errors.Join(h.start(s, always), h.handshake(&s), h.leave(s, ack, 1001, 5100), h.leave(s, ack, 1001, 6000),
					h.arrive(s, rst, 5999, 0), h.putPod(s, "pod", bpf.FastPathEstablished, nil),
					h.leave(s, syn, 3000, 0), h.arrive(s, synack, 5900, 3001), h.leave(s, ack, 3001, 5901), h.arrive(s, rst, 5901, 0))
			})
			got, flowErr := h.onlyFlow()
			testenv.Must(t, errors.Join(err, flowErr))
			if got.State != bpf.FlowClose {
				t.Errorf("state is %d with flags %#x, want %d", got.State, got.Flags, bpf.FlowClose)
			}
		})
	}
}
