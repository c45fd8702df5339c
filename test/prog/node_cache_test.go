package prog

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// What containers of different nodes send each other through the stack is decided with a connection's first packet. So
// these tests take the nodes away, or change their mode, without a new generation: only a decision that is kept does
// not notice.

func newNodesCacheHost(t *testing.T) *cacheHost {
	t.Helper()
	h := newCacheHost(t)
	h.joinCluster(t, v4.addr("gateway"), bpf.NodeDirect, false)
	return h
}

// eachNodeScene runs fn for TCP and UDP at once, with pods that nothing is known of, in a cluster.
func (h *cacheHost) eachNodeScene(t *testing.T, fn func(s scene) error) {
	t.Helper()
	for _, s := range (row{on: withPorts}).scenes() {
		err := h.on(0, func() error {
			return errors.Join(h.putMode(bpf.NodeDirect), h.start(s, bpf.FastPathEstablished), fn(s))
		})
		if err != nil {
			t.Errorf("%s %s: %v", s.name, s.proto, err)
		}
	}
}

// putMode has the remotes be reached in another way; 0: they are on no node.
func (h *cacheHost) putMode(mode bpf.NodeMode) error {
	errs := []error{h.putCluster(bpf.Cluster{Nodes: uint32(len(addressings))})} // there are others
	if mode == 0 {
		return errors.Join(append(errs, empty[bpf.PrefixKey, bpf.Node](h.programs.Maps[bpf.MapNodes]))...)
	}
	for _, f := range addressings {
		errs = append(errs, h.putNode(remotes[f.name], bpf.Node{Remote: v4.wire("gateway"), Mtu: nodeMTU, Mode: mode}))
	}
	return errors.Join(errs...)
}

// sends has from_container leave a packet of the pod's to the stack.
func (h *cacheHost) sends(s scene, text string, edits ...func(*testenv.Packet)) (outcome, error) {
	sent, err := h.send(s, "pod", text, edits...)
	return sent, errors.Join(err, checkVerdict(sent.verdict, verdictNext))
}

// leaves wants what the stack forwards, from a device, to keep its source or not.
func (h *cacheHost) leaves(sent outcome, by *netlink.LinkAttrs, keeps bool) error {
	verdict, frame, err := h.runAt(bpf.ProgToUplink, h.veth, by, sent)
	if err := errors.Join(err, checkVerdict(verdict, verdictNext)); err != nil {
		return err
	}
	if kept := bytes.Equal(frame, sent.frame); kept != keeps {
		return fmt.Errorf("a packet keeps its source: %v, want %v", kept, keeps)
	}
	return nil
}

// passes is sends and leaves.
func (h *cacheHost) passes(s scene, text string, keeps bool, edits ...func(*testenv.Packet)) error {
	sent, err := h.sends(s, text, edits...)
	if err = errors.Join(err, h.leaves(sent, h.devices["pod"], keeps)); err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	return nil
}

// opens has the packet open its connection, if that is TCP's.
func opens(s scene) func(*testenv.Packet) {
	return func(p *testenv.Packet) {
		if s.proto == tcp {
			p.TCPFlags = testenv.SYN
		}
	}
}

func TestLeavingForNodesIsRemembered(t *testing.T) {
	testenv.Require(t, ingressDevice)
	const toNode = "pod:4000 > remote:80"
	h := newNodesCacheHost(t)
	for name, then := range map[string]func(s scene) error{
		"the next packets": func(s scene) error {
			return errors.Join(h.passes(s, toNode, true), h.passes(s, toNode, true))
		},
		"another connection": func(s scene) error { return h.passes(s, "pod:4001 > remote:80", false, opens(s)) },
		"a new generation":   func(s scene) error { return errors.Join(h.emptyForwardingCache(), h.passes(s, toNode, false)) },
		"a new generation, for a packet that another CPU has received": func(s scene) error {
			p := h.packet(s, "pod", toNode)
			sent := outcome{tag: s.tag(p), frame: p.MustBuild()}
			return errors.Join(h.leaves(sent, h.devices["pod"], true), h.emptyForwardingCache(), h.leaves(sent, h.devices["pod"], false))
		},
		"a packet by another device": func(s scene) error {
			sent, err := h.sends(s, toNode)
			return errors.Join(err, h.leaves(sent, h.devices["pod2"], false))
		},
		"a packet that the stack has changed": func(s scene) error {
			sent, err := h.sends(s, toNode)
			sent.tag ^= 2
			return errors.Join(err, h.leaves(sent, h.devices["pod"], false))
		},
	} {
		t.Run(name, func(t *testing.T) {
			h.eachNodeScene(t, func(s scene) error {
				return errors.Join(h.passes(s, toNode, true, opens(s)), h.putMode(0), then(s))
			})
		})
	}
}

// Flows of remotes that are on no node must see each packet.
func TestLeavingForOthersIsNotRemembered(t *testing.T) {
	testenv.Require(t, ingressDevice)
	const toRemote = "pod:4000 > remote:80"
	h := newNodesCacheHost(t)
	h.eachNodeScene(t, func(s scene) error {
		return errors.Join(
			h.putMode(0), h.fillNonMasq(s, []nonMasq{{pod: "pod", prefix: remotes}}),
			h.putPod(s, "pod", bpf.FastPathEstablished, func(e *bpf.Endpoint) { e.NonmasqSet = uint32(owners["pod"]) }),
			h.passes(s, toRemote, true, opens(s)), h.passes(s, toRemote, true),
			empty[bpf.PrefixKey, bpf.Addr](h.programs.Maps[bpf.MapPrefixes]), h.passes(s, toRemote, false),
		)
	})
}

// What only its route brings to the tunnel leaves by another device as soon as the route does.
func TestLeavingByRouteIsNotRemembered(t *testing.T) {
	testenv.Require(t, ingressDevice)
	const toRemote = "pod:4000 > remote:80"
	h := newNodesCacheHost(t)
	h.eachNodeScene(t, func(s scene) error {
		h.encap(t, s.addressing)
		tunnel := bpf.Cluster{Nodes: uint32(len(addressings)), Tunnel: uint32(h.uplink.Index)}
		return errors.Join(h.putMode(0), h.putCluster(tunnel), h.passes(s, toRemote, true, opens(s)), h.putMode(0), h.passes(s, toRemote, false))
	})
}

// A SYN from the port behind a host port is no reply, but what follows is.
func TestHostPortRepliesToNodes(t *testing.T) {
	testenv.Require(t, ingressDevice)
	const reply = "pod:80 > remote:5000"
	h := newNodesCacheHost(t)
	h.eachNodeScene(t, func(s scene) error {
		return errors.Join(
			h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil),
			h.passes(s, reply, s.proto == tcp, opens(s)), h.passes(s, reply, false), h.passes(s, reply, false),
		)
	})
}

// A connection that continues is offloaded anyway.
func TestOffloadBeginsForNodes(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	h.joinCluster(t, v4.addr("gateway"), bpf.NodeTunnel, true)
	for _, s := range (row{on: withPorts}).scenes() {
		h.encap(t, s.addressing)
		err := h.on(0, func() error {
			err := h.start(s, bpf.FastPathEstablished)
			for range offloadAt {
				sent, sendErr := h.sends(s, "pod:4000 > remote:80")
				copy(sent.frame, slices.Concat(h.uplink.HardwareAddr, h.uplink.HardwareAddr)) // as the tunnel's frames
				err = errors.Join(err, sendErr, h.leaves(sent, h.devices["pod"], true))
			}
			return errors.Join(err, h.wantKnown(s, 2*bpf.OffloadDelivered))
		})
		if err != nil {
			t.Errorf("%s %s: %v", s.name, s.proto, err)
		}
	}
}

// arrives wants from_uplink to take a packet for a pod, or to drop it.
func (h *cacheHost) arrives(s scene, text string, verdict uint32, edits ...func(*testenv.Packet)) error {
	p := h.packet(s, "pod", text)
	copy(p.DstMAC[:], h.uplink.HardwareAddr)
	for _, edit := range edits {
		edit(&p)
	}
	got, _, err := h.run(bpf.ProgFromUplink, p.MustBuild())
	if err = errors.Join(err, checkVerdict(got, verdict)); err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	return nil
}

func TestArrivingFromNodesIsRemembered(t *testing.T) {
	const fromNode = "remote:5000 > pod:80"
	h := newNodesCacheHost(t)
	for _, tc := range []struct {
		name    string
		before  func(s scene) error
		after   func() error
		text    string
		verdict uint32
	}{
		{name: "the next packets", verdict: verdictNext},
		{name: "another connection", text: "remote:5001 > pod:80", verdict: verdictDrop},
		{name: "a new generation", after: h.emptyForwardingCache, verdict: verdictDrop},
		{name: "not to a host port's target", verdict: verdictDrop, before: func(s scene) error {
			return h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)
		}},
		{name: "not if the pod has routes", verdict: verdictDrop, before: func(s scene) error {
			return h.putPod(s, "pod", bpf.FastPathEstablished, func(e *bpf.Endpoint) { e.RouteSet = 1 })
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			text := cmp.Or(tc.text, fromNode)
			h.eachNodeScene(t, func(s scene) error {
				var errs []error
				if tc.before != nil {
					errs = append(errs, tc.before(s))
				}
				errs = append(errs, h.arrives(s, fromNode, verdictNext, opens(s)), h.putMode(bpf.NodeTunnel))
				if tc.after != nil {
					errs = append(errs, tc.after())
				}
				return errors.Join(append(errs, h.arrives(s, text, tc.verdict), h.arrives(s, text, tc.verdict))...)
			})
		})
	}
}
