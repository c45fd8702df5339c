package prog

import (
	"errors"
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestMasqSource masquerades by an uplink that has an entry or none, and a route or none.
func TestMasqSource(t *testing.T) {
	node2 := &bpf.Uplink{Addr4: v4.wire("node2"), Addr6: v6.wire("node2")}
	before := "node2" // of a route and an entry
	if testenv.FIBSource.Probe() == nil {
		before = "node"
	}
	for _, tc := range []struct {
		name       string
		needs      testenv.Feature // none: all kernels do the same
		prepare    func(*host, *testing.T, addressing)
		uplink     *bpf.Uplink // the entry
		want, drop string
	}{
		{name: "a route", needs: testenv.FIBSource, want: "node"},
		{name: "a route with a preferred source", needs: testenv.FIBSource, prepare: (*host).preferNode2, want: "node2"},
		{name: "a route and an entry", uplink: node2, want: before},
		{name: "an entry", prepare: (*host).removeDefaultRoute, uplink: node2, want: "node2"},
		{name: "neither", prepare: (*host).removeDefaultRoute, drop: "no source"},
		{name: "an entry without addresses", prepare: (*host).removeDefaultRoute, uplink: &bpf.Uplink{}, drop: "no source"},
		{name: "a route, but no address of the host", prepare: (*host).removeAddrs, drop: "no source"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.needs.Name != "" {
				testenv.Require(t, tc.needs)
			}
			h := newHost(t)
			for _, f := range addressings {
				if tc.prepare != nil {
					tc.prepare(h, t, f)
				}
			}
			eachScene(t, nil, func(t *testing.T, s scene) {
				key, uplinks := uint32(h.uplink.Index), h.programs.Maps[bpf.MapUplinks]
				testenv.Must(t, errors.Join(h.reset(), uplinks.Delete(key)))
				if tc.uplink != nil {
					testenv.Must(t, uplinks.Put(key, tc.uplink))
				}
				frame := s.packet(outgoing, false).MustBuild()
				verdict, result, err := h.runInside(bpf.ProgToUplink, frame)
				testenv.Must(t, errors.Join(err, checkVerdict(verdict, row{drop: tc.drop}.verdict()), h.checkCounters(tc.drop, len(frame))))
				if p, err := testenv.Decode(result); err != nil || tc.drop == "" && p.Src != s.addr(tc.want) {
					t.Errorf("source is %s (%v), want %s", p.Src, err, tc.want)
				}
			})
		})
	}
}

// TestSourceByRule has a rule for one pod's packets: what the programs keep about routes of another pod does not apply to it.
func TestSourceByRule(t *testing.T) {
	const table = 100

	testenv.Require(t, testenv.FIBSource)
	h := newHost(t)
	any := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	rule := netlink.NewRule()
	rule.Src, rule.Table = alone(v4.addr("pod2")), table
	testenv.Must(t, errors.Join(h.Netlink().RuleAdd(rule), h.Netlink().RouteAdd(&netlink.Route{
		Dst: any, LinkIndex: h.uplink.Index, Gw: v4.addr("gateway").AsSlice(), Src: v4.addr("node2").AsSlice(), Table: table,
	}), h.reset()))
	for _, s := range (row{on: withPorts, only: "v4"}).scenes() {
		for _, tc := range []struct{ pod, want string }{{"pod", "node"}, {"pod2", "node2"}, {"pod", "node"}} {
			_, result, err := h.runInside(bpf.ProgToUplink, s.packet(tc.pod+":4000 > remote:80", false).MustBuild())
			testenv.Must(t, err)
			if p, err := testenv.Decode(result); err != nil || p.Src != s.addr(tc.want) {
				t.Errorf("%s, source of %s is %s (%v), want %s", s.proto, tc.pod, p.Src, err, tc.want)
			}
		}
	}
}

func (h *host) preferNode2(t *testing.T, f addressing) {
	t.Helper()
	err := h.Netlink().RouteAdd(&netlink.Route{
		Dst: alone(f.addr("remote")), LinkIndex: h.uplink.Index, Gw: f.addr("gateway").AsSlice(), Src: f.addr("node2").AsSlice(),
	})
	testenv.Must(t, err)
}

func (h *host) removeDefaultRoute(t *testing.T, f addressing) {
	t.Helper()
	any := f.addr("any")
	err := h.Netlink().RouteDel(&netlink.Route{
		Dst: &net.IPNet{IP: any.AsSlice(), Mask: net.CIDRMask(0, any.BitLen())}, Gw: f.addr("gateway").AsSlice(),
	})
	testenv.Must(t, err)
}

// removeAddrs removes all addresses but link-local ones, which no router would forward, and adds a route to the
// remote.
func (h *host) removeAddrs(t *testing.T, f addressing) {
	t.Helper()
	kind := netlink.FAMILY_V4
	if f.name == "v6" {
		kind = netlink.FAMILY_V6
	}
	for _, link := range []*netlink.LinkAttrs{h.uplink, h.veth} {
		device := &netlink.Device{LinkAttrs: *link}
		addrs, err := rtnl.Addresses(h.Netlink(), device, kind)
		testenv.Must(t, err)
		for _, addr := range addrs {
			if addr.IP.IsLinkLocalUnicast() {
				continue
			}
			testenv.Must(t, h.Netlink().AddrDel(device, &addr))
		}
	}
	route := &netlink.Route{Dst: alone(f.addr("remote")), LinkIndex: h.uplink.Index, Scope: netlink.SCOPE_LINK}
	testenv.Must(t, h.Netlink().RouteReplace(route))
}
