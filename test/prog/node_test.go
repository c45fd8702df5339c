package prog

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const nodesVNI, tunnelPort, nodeMTU = 7, 4789, 900

// newClusterHost is newHost in a cluster: the remotes are containers of a node at remote, of either family. The
// tunnel is the uplink, or none; it is for this host's containers alone.
func newClusterHost(t *testing.T, remote netip.Addr, mode bpf.NodeMode, tunnel bool) *host {
	t.Helper()
	h := newHost(t)
	h.joinCluster(t, remote, mode, tunnel)
	return h
}

func (h *host) joinCluster(t *testing.T, remote netip.Addr, mode bpf.NodeMode, tunnel bool) {
	t.Helper()
	cluster := bpf.Cluster{Nodes: uint32(len(addressings)), Vni: nodesVNI, Port: tunnelPort}
	if tunnel {
		cluster.Tunnel = uint32(h.uplink.Index)
		cluster.Containers4, cluster.Containers6 = maskedPrefix("8.0.244.0/24"), maskedPrefix("fd00:10:86dd::/48")
	}
	t.Cleanup(func() { // an array, which all tests share
		testenv.NoError(t, h.putCluster(bpf.Cluster{}))
	})
	errs := []error{h.putCluster(cluster)}
	for _, f := range addressings {
		errs = append(errs, h.putNode(remotes[f.name], bpf.Node{Remote: wire(remote), Mtu: nodeMTU, Mode: mode}))
	}
	testenv.Must(t, errors.Join(errs...))
}

// maskedPrefix returns a prefix as address and mask.
func maskedPrefix(prefix string) bpf.Prefix {
	const mappedBits = 96
	p := netip.MustParsePrefix(prefix)
	ones := p.Bits()
	if p.Addr().Is4() {
		ones += mappedBits
	}
	mask := net.CIDRMask(ones, 8*net.IPv6len)
	return bpf.Prefix{Addr: wire(p.Addr()), Mask: bpf.Addr{Bytes: [net.IPv6len]uint8(mask)}}
}

func (h *host) putCluster(c bpf.Cluster) error {
	return h.programs.Maps[bpf.MapCluster].Put(uint32(0), c)
}

func (h *host) putNode(prefix string, node bpf.Node) error {
	return h.programs.Maps[bpf.MapNodes].Put(prefixKey(0, netip.MustParsePrefix(prefix)), node)
}

// Traffic between nodes is not masqueraded: by direct routes, and whatever leaves by the tunnel.
func TestNodesAreNotMasqueraded(t *testing.T) {
	masqueraded := func(to string) row {
		return row{in: "pod:4000 > " + to, out: "node:* > " + to, after: []flow{snat(to, "node:*", "pod:4000")}}
	}
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) {
			h := newClusterHost(t, v4.addr("gateway"), bpf.NodeDirect, false)
			for name, r := range map[string]row{
				"a container of another node": {in: outgoing},
				"protocols without ports":     {on: withoutPorts, in: "pod3:0 > remote:0"},
				"a later fragment":            {on: withPorts, in: outgoing, raw: fragment(1)},
				"VXLAN of a container":        {on: []proto{udp}, in: "pod3:4000 > remote:4789"},
				"a reply from a host port": {
					on: withPorts, flows: []flow{dnat("remote:5000", "pod:80", "node2:8080")}, in: "pod:80 > remote:5000", reply: true,
					out: "node2:8080 > remote:5000", after: []flow{dnat("remote:5000", "pod:80", "node2:8080").accepted()},
				},
				"outside of the cluster":    masqueraded("onlink:80"),
				"VXLAN in the host's name":  {on: []proto{udp}, in: "pod3:4000 > onlink:4789", drop: "tunnel", anyFlows: true},
				"the same with masqTunnels": {on: []proto{udp}, in: "pod:4000 > onlink:4789", drop: "tunnel", anyFlows: true},
				"VXLAN as a reply from a host port": {
					on: []proto{udp}, flows: []flow{dnat("remote:4789", "plain:80", "node:8080")}, in: "plain:80 > remote:4789", reply: true, drop: "tunnel", anyFlows: true,
				},
				"the same without its flow": {
					on: []proto{udp}, ports: []hostPort{{host: "node:8080", to: "plain:80"}}, in: "plain:80 > remote:4789", reply: true, drop: "tunnel", anyFlows: true,
				},
				"VXLAN to a client's port that was translated": {
					on: []proto{udp}, flows: []flow{dnat("remote:5000", "plain:80", "node:8080").by(4789)}, in: "plain:80 > remote:5000", reply: true,
					out: "plain:80 > remote:4789", drop: "tunnel", anyFlows: true,
				},
				"VXLAN in the pod's own name": {on: []proto{udp}, in: "plain:4000 > onlink:4789"},
				"VXLAN as a reply in the pod's own name": {
					on: []proto{udp}, flows: []flow{dnat("remote:4789", "pod:80", "pod:80")}, in: "pod:80 > remote:4789", reply: true,
					after: []flow{dnat("remote:4789", "pod:80", "pod:80")},
				},
				"a tunnel's port by TCP": {on: []proto{tcp}, in: "pod3:4000 > onlink:4789", out: "node:* > onlink:4789", after: []flow{snat("onlink:4789", "node:*", "pod3:4000")}},
			} {
				r.name = name
				h.runRow(t, program, r)
			}
			testenv.Must(t, h.putCluster(bpf.Cluster{}))
			r := masqueraded("remote:80")
			r.name = "without a cluster nothing is looked up"
			h.runRow(t, program, r)
		})
	}
	h := newClusterHost(t, v4.addr("gateway"), bpf.NodeTunnel, true)
	h.runRow(t, bpf.ProgToUplink, row{name: "by the tunnel, to a node that is gone", in: "pod:4000 > onlink:80"})
}

// VXLAN in the host's name is the host's. What the stack has given that source is not, whoever has sent it.
func TestTunnelInTheHostsName(t *testing.T) {
	testenv.Require(t, ingressDevice)
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		h := newClusterHost(t, v4.addr("gateway"), bpf.NodeTunnel, false)
		for name, tc := range map[string]struct {
			ingress int
			row     row
		}{
			"the host's":              {0, row{in: "node:80 > onlink:4789"}},
			"from a container":        {h.veth.Index, row{in: "node:80 > onlink:4789", drop: "tunnel"}},
			"from another host":       {h.uplink.Index, row{in: "node:80 > onlink:4789", drop: "tunnel"}},
			"by a second address":     {h.uplink.Index, row{in: "node2:80 > onlink:4789", drop: "tunnel"}},
			"routed, not changed":     {h.uplink.Index, row{in: "remote2:80 > onlink:4789"}},
			"forwarded, other port":   {h.uplink.Index, row{in: "node:80 > onlink:4788"}},
			"behind three options":    {h.uplink.Index, row{in: "node:80 > onlink:80", only: "v6", raw: withHeaders(3, unix.IPPROTO_DSTOPTS), drop: "tunnel"}},
			"behind a routing header": {h.uplink.Index, row{in: "node:80 > onlink:80", only: "v6", raw: routed, drop: "tunnel"}},
			"behind two fragment headers": {
				h.uplink.Index, row{in: "node:80 > onlink:80", only: "v6", raw: withHeaders(2, unix.IPPROTO_FRAGMENT), drop: "tunnel"},
			},
			"the host's, behind three options": {0, row{in: "node:80 > onlink:80", only: "v6", raw: withHeaders(3, unix.IPPROTO_DSTOPTS)}},
			"routed, behind three options":     {h.uplink.Index, row{in: "remote2:80 > onlink:80", only: "v6", raw: withHeaders(3, unix.IPPROTO_DSTOPTS)}},
			"forwarded ICMP":                   {h.uplink.Index, row{in: "node:80 > onlink:80", raw: timestamp}},
		} {
			tc.row.name = program + " " + name
			if tc.row.on = []proto{udp}; name == "forwarded ICMP" {
				tc.row.on = []proto{echo}
			}
			h.ingress = uint32(tc.ingress)
			h.runRow(t, program, tc.row)
		}
	}
}

// What comes from another node is translated if it is for a host port, or a reply to what was masqueraded.
func TestTranslatedFromNodes(t *testing.T) {
	toPod := []hostPort{{host: "any:8080", to: "pod:80"}}
	h := newClusterHost(t, v4.addr("gateway"), bpf.NodeDirect, false)
	for name, r := range map[string]row{
		"to a container": {in: "remote:5000 > pod:80"},
		"to a host port": {
			ports: toPod, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		"to its target, while the client uses the host port": {
			ports: toPod, flows: []flow{dnat("remote:5000", "pod:80", "node:8080").established()}, in: "remote:5000 > pod:80", out: "remote:* > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080").established(), dnat("remote:*", "pod:80", "pod:80").by(5000)},
		},
		"a reply from outside of the cluster": {
			flows: []flow{snat("onlink:80", "node:20000", "pod:4000")}, reply: true, in: "onlink:80 > node:20000", out: "onlink:80 > pod:4000",
			after: []flow{snat("onlink:80", "node:20000", "pod:4000").accepted()},
		},
	} {
		r.name, r.on = name, withPorts
		h.runRow(t, bpf.ProgFromUplink, r)
	}
}

func (h *host) runRow(t *testing.T, program string, r row) {
	t.Helper()
	t.Run(r.name, func(t *testing.T) {
		for _, s := range r.scenes() {
			if err := errors.Join(h.emptyForwardingCache(), h.check(program, s, r)); err != nil {
				t.Errorf("%s %s: %v", s.name, s.proto, err)
			}
		}
	})
}

// Packets to another node bypass the stack by the tunnel, if the host's route has it as well.
func TestFastPathToNodes(t *testing.T) {
	const request = "pod:4000 > remote:80"
	fast := fastPathRow{path: always, in: request, out: request}
	opening := fast
	opening.flags = testenv.SYN
	slow := fastPathRow{path: always, in: request}
	long := slow
	long.edit = func(p *testenv.Packet) { p.Payload = strings.Repeat("x", nodeMTU) }
	for _, tc := range []struct {
		name    string
		mode    bpf.NodeMode
		tunnel  bool
		encap   bool
		row     fastPathRow
		noNodes bool
	}{
		{name: "tunnel", mode: bpf.NodeTunnel, tunnel: true, encap: true, row: fast},
		{name: "tunnel, while the node may choose", mode: bpf.NodeEither, tunnel: true, encap: true, row: fast},
		{name: "longer than the path's MTU", mode: bpf.NodeTunnel, tunnel: true, encap: true, row: long},
		{name: "a route with a tunnel of another engine", mode: bpf.NodeDirect, tunnel: true, encap: true, row: slow},
		{name: "no node", tunnel: true, encap: true, row: slow, noNodes: true},
		{name: "direct", mode: bpf.NodeDirect, row: fast},
		{name: "direct, opening a connection", mode: bpf.NodeDirect, row: opening},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newClusterHost(t, v4.addr("gateway"), tc.mode, tc.tunnel)
			for _, s := range (row{on: withPorts}).scenes() {
				if tc.encap {
					h.encap(t, s.addressing)
				}
				if tc.noNodes {
					testenv.Must(t, empty[bpf.PrefixKey, bpf.Node](h.programs.Maps[bpf.MapNodes]))
				}
				if err := h.checkFastPath(bpf.ProgFromContainer, s, tc.row); err != nil {
					t.Errorf("%s %s: %v", s.name, s.proto, err)
				}
			}
		})
	}
}

// Before UDP to another node bypasses the stack, one packet must have left by the tunnel, whose frames have its own MAC
// address twice.
func TestOffloadChecksTheRouteToNodes(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newCacheHost(t)
	h.joinCluster(t, v4.addr("gateway"), bpf.NodeTunnel, true)
	const podSide, remoteSide = 2 * bpf.OffloadDelivered, bpf.OffloadDelivered
	eachScene(t, []proto{udp}, func(t *testing.T, s scene) {
		h.encap(t, s.addressing)
		leave := func(to testenv.MAC) error {
			p := h.packet(s, "pod", "pod:4000 > remote:80")
			p.SrcMAC, p.DstMAC = testenv.MAC(h.uplink.HardwareAddr), to
			verdict, _, err := h.runAt(bpf.ProgToUplink, h.veth, h.veth, outcome{tag: s.tag(p), frame: p.MustBuild()})
			return errors.Join(err, checkVerdict(verdict, verdictNext))
		}
		arrive := func(wanted bpf.OffloadState) error {
			p := h.packet(s, "pod", "remote:80 > pod:4000")
			verdict, _, err := h.runAt(bpf.ProgToContainer, h.veth, h.uplink, outcome{tag: s.tag(p) | tagObserve, frame: p.MustBuild()})
			return errors.Join(err, checkVerdict(verdict, verdictNext), h.wantKnown(s, wanted))
		}
		err := h.on(0, func() error {
			return errors.Join(
				h.start(s, bpf.FastPathEstablished),
				arrive(remoteSide), arrive(remoteSide),
				leave(testenv.MAC{2, 0, 0, 0, 0, 8}), arrive(remoteSide),
				leave(testenv.MAC(h.uplink.HardwareAddr)), arrive(podSide|remoteSide),
			)
		})
		testenv.NoError(t, err)
	})
}

// The kernel's route lookup does not name the device of a route with a tunnel. A packet with a source behind one does not
// bypass the stack when another device has received it, and is dropped if its node would not send it so.
func TestNodesAreNotBelievedElsewhere(t *testing.T) {
	const request = "remote:5000 > pod:80"
	for mode, drop := range map[bpf.NodeMode]string{bpf.NodeTunnel: "node", bpf.NodeDirect: "", bpf.NodeEither: ""} {
		h := newClusterHost(t, v4.addr("gateway"), mode, false)
		for _, s := range (row{on: withPorts}).scenes() {
			h.encap(t, s.addressing)
			err := h.checkFastPath(bpf.ProgFromUplink, s, fastPathRow{path: always, in: request})
			if drop != "" {
				err = h.check(bpf.ProgFromUplink, s, row{in: request, drop: drop})
			}
			if err != nil {
				t.Errorf("mode %d, %s %s: %v", mode, s.name, s.proto, err)
			}
		}
		for name, r := range map[string]row{
			"three options":      {only: "v6", raw: withHeaders(3, unix.IPPROTO_DSTOPTS)},
			"a routing header":   {only: "v6", raw: routed},
			"no echo":            {on: []proto{echo}, raw: timestamp},
			"no whole header":    {on: withPorts, raw: cut(4)},
			"an error":           {on: []proto{udp}, raw: errorFromRemote},
			"to the host itself": {in: "remote:5000 > node:80", on: []proto{echo}, raw: timestamp},
		} {
			if r.in == "" {
				r.in, r.drop = request, drop
			}
			r.name = fmt.Sprintf("mode %d, %s", mode, name)
			h.runRow(t, bpf.ProgFromUplink, r)
		}
		if drop != "" { // else it waits for the first one
			h.runRow(t, bpf.ProgFromUplink, row{name: "a later fragment", in: request, on: withPorts, raw: fragment(1), drop: drop})
		}
	}
}

// errorFromRemote returns an ICMP error of a remote about a packet to another host.
func errorFromRemote(s scene, frame []byte) []byte {
	kind := errorKinds[s.name][0]
	about, err := testenv.ICMPErrorPacket(s.addr("remote"), s.packet("pod:4000 > onlink:80", false).MustBuild(), kind.typ, kind.code, kind.rest, 100)
	if err != nil {
		panic(err)
	}
	copy(about.DstMAC[:], frame)
	return about.MustBuild()
}

// encap gives the remotes' network a route with a tunnel.
func (h *host) encap(t *testing.T, f addressing) {
	t.Helper()
	err := h.Do(func() error { // not by ip, which does not run on emulated machines of other architectures
		routes, err := rtnl.OpenNodeRoutes(rtnl.NodeProtocol)
		if err != nil {
			return err
		}
		defer routes.Close()
		return routes.Replace(rtnl.NodeRoute{
			Prefix: netip.MustParsePrefix(remotes[f.name]), Device: h.uplink.Index,
			Tunnel: rtnl.Tunnel{ID: nodesVNI, Remote: v4.addr("gateway")},
		})
	})
	testenv.Must(t, err)
}

// runFromTunnel runs from_uplink on a frame that the tunnel has received from outer; invalid: not by a tunnel.
func (h *host) runFromTunnel(frame []byte, outer netip.Addr, vni uint32) (verdict uint32, result []byte, err error) {
	packet := h.packet(bpf.ProgFromUplink, frame)
	if outer.IsValid() {
		packet.Tunnel = loader.Tunnel{Remote: outer, VNI: vni}
	}
	err = h.Do(func() error {
		verdict, result, err = loader.TestRun(h.programs.Programs[bpf.ProgFromUplink], packet)
		return err
	})
	return verdict, result, err
}
