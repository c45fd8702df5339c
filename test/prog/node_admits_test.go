package prog

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// What the tunnel receives must be from the node that has the inner source.
func TestTunnelAdmitsNodes(t *testing.T) {
	testenv.Require(t, testenv.TunnelSource)
	const request = "remote:5000 > plain:80"
	none := netip.Addr{}
	for _, under := range addressings {
		node, other := under.addr("gateway"), under.addr("onlink")
		for _, tc := range []struct {
			name  string
			outer netip.Addr
			vni   uint32
			in    string
			only  string
			raw   func(s scene, f []byte) []byte
			tag   uint32
			waits bool // for its first fragment
			drop  string
		}{
			{name: "from the node", outer: node, in: request},
			{name: "from another node", outer: other, in: request, drop: "node"},
			{name: "of another network", outer: node, vni: nodesVNI + 1, in: request, drop: "node"},
			{name: "without a tunnel", outer: none, in: request, drop: "node"},
			{name: "by the other family", outer: otherFamily(under).addr("gateway"), in: request, drop: "node"},
			{name: "with a source of no node", outer: node, in: "onlink:5000 > plain:80", drop: "node"},
			{name: "with a source of this node", outer: node, in: "pod:5000 > plain:80", drop: "node"},
			{name: "with the host's source", outer: node, in: "node:5000 > plain:80", drop: "node"},
			{name: "with the node's own source", outer: node, in: "gateway:5000 > plain:80", drop: "node"},
			{name: "to the containers' gateway", outer: node, in: "remote:5000 > podgw:80"},
			{name: "to another host", outer: node, in: "remote:5000 > onlink:80", drop: "node"},
			{name: "to this host", outer: node, in: "remote:5000 > node:80", drop: "node"},
			{name: "to another node's container", outer: node, in: "remote:5000 > remote2:80", drop: "node"},
			{name: "received once more", in: request, tag: tagAdmitted},
			{name: "a conntrack update", in: request, tag: tagCTUpdate},
			{name: "with a tag, but from a tunnel", outer: node, in: request, tag: tagAdmitted, drop: "node"},
			{name: "with an update's tag, but from a tunnel", outer: node, in: request, tag: tagCTUpdate, drop: "node"},
			{name: "a later fragment", outer: node, in: request, raw: fragment(1), waits: true},
			{name: "a forged later fragment", outer: other, in: request, raw: fragment(1), drop: "node"},
			{name: "ARP", outer: node, only: "v4", in: request, raw: typed(0x0806), drop: "node"},
			{name: "a truncated header", outer: node, in: request, raw: cut(4), drop: "node"},
		} {
			t.Run(under.name+" "+tc.name, func(t *testing.T) {
				h := newClusterHost(t, node, bpf.NodeTunnel, true)
				for _, s := range (row{only: tc.only}).scenes() {
					packet := s.packet(tc.in, false)
					packet.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 0x77} // tunnels do not know each other's
					frame := packet.MustBuild()
					if tc.raw != nil {
						frame = tc.raw(s, frame)
					}
					vni := tc.vni
					if vni == 0 {
						vni = nodesVNI
					}
					h.tag = tc.tag
					verdict := uint32(verdictNext)
					if tc.waits || tc.drop != "" {
						verdict = verdictDrop
					}
					if err := h.checkAdmitted(frame, tc.outer, vni, verdict, tc.drop); err != nil {
						t.Errorf("%s %s: %v", s.name, s.proto, err)
					}
				}
			})
		}
	}
}

// TestTunnelAdmitsOneFamily has a host whose containers have addresses of one family: the tunnel is for nobody of the other.
func TestTunnelAdmitsOneFamily(t *testing.T) {
	testenv.Require(t, testenv.TunnelSource)
	const request = "remote:5000 > plain:80"
	node := v4.addr("gateway")
	for missing, change := range map[string]func(*bpf.Cluster){
		"v4": func(c *bpf.Cluster) { c.Containers4 = maskedPrefix("0.0.0.0/32") },
		"v6": func(c *bpf.Cluster) { c.Containers6 = maskedPrefix("::/128") },
	} {
		h := newClusterHost(t, node, bpf.NodeTunnel, true)
		var cluster bpf.Cluster
		err := h.programs.Maps[bpf.MapCluster].Lookup(uint32(0), &cluster)
		change(&cluster)
		testenv.Must(t, errors.Join(err, h.putCluster(cluster)))
		for _, s := range (row{on: []proto{udp}}).scenes() {
			want, reason := uint32(verdictNext), ""
			if s.name == missing {
				want, reason = verdictDrop, "node"
			}
			if err := h.checkAdmitted(s.packet(request, false).MustBuild(), node, nodesVNI, want, reason); err != nil {
				t.Errorf("without %s: %s: %v", missing, s.name, err)
			}
		}
	}
}

func otherFamily(f addressing) addressing {
	if f.name == "v4" {
		return v6
	}
	return v4
}

// checkAdmitted runs from_uplink on a frame that the tunnel has received.
func (h *host) checkAdmitted(frame []byte, outer netip.Addr, vni, want uint32, reason string) error {
	if err := h.reset(); err != nil {
		return err
	}
	verdict, _, err := h.runFromTunnel(frame, outer, vni)
	if err != nil {
		return err
	}
	return errors.Join(checkVerdict(verdict, want), h.checkCounters(reason, len(frame)))
}

// What the tunnel receives for an address that no container has does not leave the host again. The host answers where it
// has the address or refuses it, and another plugin's container may have it.
func TestTunnelForFreeAddresses(t *testing.T) {
	testenv.Require(t, testenv.TunnelSource)
	node := v4.addr("gateway")
	h := newClusterHost(t, node, bpf.NodeTunnel, true)
	check := func(what, reason string) {
		t.Helper()
		for name, r := range map[string]row{
			"plain": {}, "unreadable": {on: []proto{echo}, raw: timestamp}, "behind options": {only: "v6", raw: withHeaders(3, unix.IPPROTO_DSTOPTS)},
		} {
			for _, s := range r.scenes() {
				frame := s.packet("remote:5000 > nopod:80", false).MustBuild()
				if r.raw != nil {
					frame = r.raw(s, frame)
				}
				want := uint32(verdictNext)
				if reason != "" {
					want = verdictDrop
				}
				if err := h.checkAdmitted(frame, node, nodesVNI, want, reason); err != nil {
					t.Errorf("%s, %s: %s %s: %v", what, name, s.name, s.proto, err)
				}
			}
		}
	}
	check("refused by a route", "")
	replace := func(gateway string) {
		t.Helper()
		for _, f := range addressings {
			route := &netlink.Route{Dst: alone(f.addr("nopod")), LinkIndex: h.veth.Index, Scope: netlink.SCOPE_LINK}
			if gateway != "" {
				testenv.Must(t, h.Netlink().RouteDel(route))
				route = &netlink.Route{Dst: route.Dst, Gw: f.addr(gateway).AsSlice()}
			}
			testenv.Must(t, h.Netlink().RouteAdd(route))
		}
	}
	replace("")
	check("another plugin's", "")
	replace("gateway")
	check("to the outside", "no endpoint")
}

// A forged packet does not take the entry of a connection in the forwarding cache. What is admitted is for this host,
// whatever its MAC address.
func TestTunnelAdmitsBeforeTheCache(t *testing.T) {
	testenv.Require(t, testenv.TunnelSource)
	const request = "remote:5000 > plain:80"
	node, other := v4.addr("gateway"), v4.addr("onlink")
	h := newClusterHost(t, node, bpf.NodeTunnel, true)
	for _, s := range (row{on: withPorts}).scenes() {
		packet := s.packet(request, false)
		packet.DstMAC = testenv.MAC{2, 0, 0, 0, 0, 0x77}
		if s.proto == tcp {
			packet.TCPFlags = testenv.ACK
		}
		frame := packet.MustBuild()
		errs := []error{h.reset(), h.emptyForwardingCache(), h.putFastPathEndpoint(s.addressing, "plain", bpf.FastPathAlways)}
		for _, step := range []struct {
			outer   netip.Addr
			verdict uint32
		}{{other, verdictDrop}, {node, verdictRedirect}, {node, verdictRedirect}, {other, verdictDrop}} {
			verdict, _, err := h.runFromTunnel(frame, step.outer, nodesVNI)
			errs = append(errs, err, checkVerdict(verdict, step.verdict))
		}
		if flows, err := h.flows().all(); err != nil || len(flows) > 0 {
			errs = append(errs, fmt.Errorf("flows %v, want none: replies are not masqueraded (%w)", flows, err))
		}
		if err := errors.Join(errs...); err != nil {
			t.Errorf("%s %s: %v", s.name, s.proto, err)
		}
	}
}
