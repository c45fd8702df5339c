package prog

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const routeSet = 7

// gatewayRow is a packet of a pod that has routes with gateways, or to it. It runs for both families.
type gatewayRow struct {
	name    string
	program string                       // "": from_container
	on      []proto                      // nil: UDP
	behind  string                       // the pod behind the veth; "": "pod"
	spoofs  bool                         // antiSpoof is off
	routes  map[string]map[string]string // of "pod": gateway ("": the host) to prefix by family
	flows   []flow
	in      string
	edit    func(*testenv.Packet)
	raw     func(s scene, f []byte) []byte

	to   string // "pod": the packet goes to a pod's veth; "neighbor": unchanged to an uplink; "": to the stack
	out  string // "": as in
	drop string
}

func TestGatewayRoutes(t *testing.T) {
	remotesBy := func(gateway string) map[string]map[string]string {
		return map[string]map[string]string{gateway: remotes}
	}
	allBy := func(gateway string) map[string]map[string]string {
		return map[string]map[string]string{gateway: everything}
	}
	hidden := map[string]map[string]string{"pod2": remotes, "": remoteAlone}
	lastHop := func(p *testenv.Packet) { p.TTL = 1 }
	fromGateway := func(r gatewayRow) gatewayRow { r.behind, r.spoofs = "pod2", true; return r }

	h := newHost(t)
	for _, r := range []gatewayRow{
		{name: "a pod", on: protos, routes: remotesBy("pod2"), in: outgoing, to: "pod"},
		{name: "a pod, with its last hop", routes: remotesBy("pod2"), in: outgoing, edit: lastHop, to: "pod"},
		{name: "a pod, for a later fragment", on: withPorts, routes: remotesBy("pod2"), in: outgoing, raw: fragment(1), to: "pod"},
		{name: "a neighbor", on: protos, routes: remotesBy("onlink"), in: outgoing, to: "neighbor"},
		{name: "everything by a neighbor", routes: allBy("onlink"), in: outgoing, to: "neighbor"},
		{name: "another destination", routes: map[string]map[string]string{"pod2": remoteAlone}, in: "pod:4000 > remote2:80"},
		{name: "a more specific route to the host", routes: hidden, in: outgoing},
		{name: "beside a more specific route to the host", routes: hidden, in: "pod:4000 > remote2:80", to: "pod"},
		{name: "a gateway behind another", routes: remotesBy("router"), in: outgoing, drop: "next hop"},
		{name: "the host's address, which ADD does not write", routes: remotesBy("node"), in: outgoing, drop: "next hop"},
		{name: "a link-local destination", on: withPorts, routes: allBy("pod2"), in: "pod:4000 > linklocal:80"},
		{name: "a link-local source", on: withPorts, spoofs: true, routes: allBy("pod2"), in: "linklocal:4000 > remote:80"},
		{name: "the host's address as source", spoofs: true, routes: allBy("onlink"), in: "vip:4000 > remote:80"},
		{name: "the loopback's address as source", spoofs: true, routes: allBy("onlink"), in: "loopback:4000 > remote:80"},
		{name: "a frame for another", routes: allBy("pod2"), in: outgoing, edit: func(p *testenv.Packet) { p.DstMAC[5]++ }},

		fromGateway(gatewayRow{name: "from a pod", routes: remotesBy("pod2"), in: "remote:80 > pod:4000", to: "pod"}),
		fromGateway(gatewayRow{name: "from a pod, a later fragment", on: withPorts, routes: remotesBy("pod2"), in: "remote:80 > pod:4000", raw: fragment(1), to: "pod"}),
		fromGateway(gatewayRow{name: "from a pod that is no gateway", routes: remotesBy("plain"), in: "remote:80 > pod:4000"}),
		fromGateway(gatewayRow{name: "from a pod that is the gateway of others", routes: map[string]map[string]string{"pod2": remoteAlone}, in: "remote2:80 > pod:4000"}),
		fromGateway(gatewayRow{name: "from a pod in the host's name", routes: allBy("pod2"), in: "vip:80 > pod:4000"}),
		fromGateway(gatewayRow{name: "from a pod in a third one's name", routes: allBy("pod2"), in: "plain:80 > pod:4000"}),

		{name: "from a neighbor", program: bpf.ProgFromUplink, routes: remotesBy("onlink"), in: "remote:80 > pod:4000", to: "pod"},
		{
			name: "from a neighbor, to a masqueraded flow", on: withPorts, program: bpf.ProgFromUplink, routes: remotesBy("onlink"),
			flows: []flow{snat("remote:80", "node:5000", "pod:4000")}, in: "remote:80 > node:5000", to: "pod", out: "remote:80 > pod:4000",
		},
		{name: "from an uplink without the gateway", program: bpf.ProgFromUplink, routes: remotesBy("plain"), in: "remote:80 > pod:4000"},
		{name: "from an uplink in the host's name", program: bpf.ProgFromUplink, routes: allBy("onlink"), in: "vip:80 > pod:4000"},
		{name: "from an uplink in a pod's name", program: bpf.ProgFromUplink, routes: allBy("onlink"), in: "plain:80 > pod:4000", drop: "own source"},
	} {
		if r.on == nil {
			r.on = []proto{udp}
		}
		t.Run(r.name, func(t *testing.T) {
			eachScene(t, r.on, func(t *testing.T, s scene) {
				testenv.NoError(t, h.checkGateway(s, r))
			})
		})
	}
}

func (h *host) checkGateway(s scene, r gatewayRow) error {
	if r.program == "" {
		r.program = bpf.ProgFromContainer
	}
	if r.behind == "" {
		r.behind = "pod"
	}
	if err := errors.Join(h.reset(), h.fill(s, nil, r.flows), h.putGatewayPods(s, r)); err != nil {
		return err
	}
	reply := r.flows != nil
	packet := s.packet(r.in, reply)
	copy(packet.SrcMAC[:], podMAC[:])
	copy(packet.DstMAC[:], h.device(r.program).HardwareAddr)
	if r.edit != nil {
		r.edit(&packet)
	}
	frame := packet.MustBuild()
	if r.raw != nil {
		frame = r.raw(s, frame)
	}
	want := bytes.Clone(frame)
	if r.out != "" {
		want = s.readdress(packet, r.out, reply).MustBuild()
	}
	if r.to == "pod" {
		copy(want, append(podMAC[:], hostMAC[:]...))
	}
	verdict, result, err := h.runInside(r.program, frame)
	if err != nil {
		return err
	}
	if !bytes.Equal(result, want) {
		return fmt.Errorf("packet is\n%x, want\n%x", result, want)
	}
	wanted := row{drop: r.drop, redirect: r.to != ""}.verdict()
	return errors.Join(checkVerdict(verdict, wanted), h.checkCounters(r.drop, len(frame)))
}

// putGatewayPods writes the pods, of which the one behind the veth is on it, and all others on lo.
func (h *host) putGatewayPods(s scene, r gatewayRow) error {
	maps := h.programs.Maps
	errs := []error{h.emptyForwardingCache()}
	for pod := range owners {
		endpoint := bpf.Endpoint{
			Owner: owners[pod], Network: 1, Container: owners[pod], Ifindex: uint32(h.lo.Index),
			Gateway: s.addressing.wire("podgw"), Mac: podMAC, HostMac: hostMAC, Mtu: 1500, FastPath: bpf.FastPathNever,
		}
		device := bpf.Device{Owner: owners[pod], Network: 1, Container: owners[pod], Mac: podMAC}
		if !r.spoofs {
			device.Flags = bpf.DeviceAntiSpoof
		}
		if s.name == "v4" {
			device.Addr4 = s.addressing.wire(pod)
		} else {
			device.Addr6 = s.addressing.wire(pod)
		}
		if pod == "pod" {
			endpoint.RouteSet, device.RouteSet = routeSet, routeSet
		}
		if pod == r.behind {
			endpoint.Ifindex = uint32(h.veth.Index)
			errs = append(errs, maps[bpf.MapDevices].Put(endpoint.Ifindex, device))
		}
		errs = append(errs, maps[bpf.MapEndpoints].Put(s.addressing.wire(pod), endpoint))
	}
	return errors.Join(append(errs, h.putGatewayRoutes(s, r.routes))...)
}

// putGatewayRoutes writes the routes of the row for the scene's family. For the other one, everything has
// a gateway: it must not count.
func (h *host) putGatewayRoutes(s scene, routes map[string]map[string]string) error {
	m := h.programs.Maps[bpf.MapPrefixes]
	put := func(f addressing, prefix netip.Prefix, gateway string) error {
		var value bpf.Addr
		if gateway != "" {
			value = f.wire(gateway)
		}
		return m.Put(prefixKey(routeSet, prefix), value)
	}
	errs := []error{empty[bpf.PrefixKey, bpf.Addr](m)}
	for _, f := range addressings {
		if f.name != s.name {
			errs = append(errs, put(f, netip.MustParsePrefix(everything[f.name]), "pod2"))
			continue
		}
		for gateway, prefixes := range routes {
			errs = append(errs, put(f, netip.MustParsePrefix(prefixes[f.name]), gateway))
		}
	}
	return errors.Join(errs...)
}
