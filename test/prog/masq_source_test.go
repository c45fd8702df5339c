package prog

import (
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// masqueradesAs checks the source address of a masqueraded packet, with uplink as the entry in
// uplinks, or none. The entry of these tests has another address than the route, so that the packet
// shows which of them was used.
func (h *host) masqueradesAs(s scene, uplink *bpf.Uplink, want, drop string) error {
	if err := h.reset(); err != nil {
		return err
	}
	key := uint32(h.uplink.Index)
	if err := h.programs.Maps[bpf.MapUplinks].Delete(key); err != nil {
		return err
	}
	if uplink != nil {
		if err := h.programs.Maps[bpf.MapUplinks].Put(key, uplink); err != nil {
			return err
		}
	}
	frame := s.packet(outgoing, false).MustBuild()
	verdict, result, err := h.runInside(bpf.ProgToUplink, frame)
	if err != nil {
		return err
	}
	p, err := testenv.Decode(result)
	if err != nil {
		return err
	}
	if verdict == verdictNext && drop != "" {
		return fmt.Errorf("packet left from %s, should be dropped", p.Src)
	}
	if err := errors.Join(checkVerdict(verdict, row{drop: drop}.verdict()), h.checkCounters(drop, len(frame))); err != nil {
		return err
	}
	if drop == "" && p.Src != s.addr(want) {
		return fmt.Errorf("source is %s, want %s (%s)", p.Src, want, s.addr(want))
	}
	return nil
}

var uplinkNode2 = &bpf.Uplink{Addr4: v4.wire("node2"), Addr6: v6.wire("node2")}

func TestMasqSourceFromRoute(t *testing.T) {
	testenv.Require(t, testenv.FIBSource)
	h := newHost(t)
	eachScene(t, nil, func(t *testing.T, s scene) {
		if err := h.masqueradesAs(s, nil, "node", ""); err != nil {
			t.Error(err)
		}
	})
}

func TestMasqSourcePreferredByRoute(t *testing.T) {
	testenv.Require(t, testenv.FIBSource)
	h := newHost(t)
	for _, f := range addressings {
		route := &netlink.Route{
			Dst: alone(f.addr("remote")), LinkIndex: h.uplink.Index, Gw: f.addr("gateway").AsSlice(), Src: f.addr("node2").AsSlice(),
		}
		if err := h.Netlink().RouteAdd(route); err != nil {
			t.Fatal(err)
		}
	}
	eachScene(t, nil, func(t *testing.T, s scene) {
		if err := h.masqueradesAs(s, nil, "node2", ""); err != nil {
			t.Error(err)
		}
	})
}

// TestMasqSourceFromUplinkEntry has no route to the remote: all kernels use the entry.
func TestMasqSourceFromUplinkEntry(t *testing.T) {
	h := newHost(t)
	h.removeDefaultRoutes(t)
	eachScene(t, nil, func(t *testing.T, s scene) {
		if err := h.masqueradesAs(s, uplinkNode2, "node2", ""); err != nil {
			t.Error(err)
		}
	})
}

// TestMasqSourceRouteBeforeUplinkEntry has a route and an entry: the route takes precedence if the
// kernel can look up its source.
func TestMasqSourceRouteBeforeUplinkEntry(t *testing.T) {
	want := "node2"
	if testenv.FIBSource.Probe() == nil {
		want = "node"
	}
	h := newHost(t)
	eachScene(t, nil, func(t *testing.T, s scene) {
		if err := h.masqueradesAs(s, uplinkNode2, want, ""); err != nil {
			t.Error(err)
		}
	})
}

func TestMasqNoSource(t *testing.T) {
	h := newHost(t)
	h.removeDefaultRoutes(t)
	for name, uplink := range map[string]*bpf.Uplink{"no entry": nil, "an entry without addresses": {}} {
		t.Run(name, func(t *testing.T) {
			eachScene(t, nil, func(t *testing.T, s scene) {
				if err := h.masqueradesAs(s, uplink, "", "no source"); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestMasqNoSourceDespiteRoute has a route, but only link-local addresses on the host, which no
// router would forward.
func TestMasqNoSourceDespiteRoute(t *testing.T) {
	h := newHost(t)
	for _, f := range addressings {
		for _, link := range []*netlink.LinkAttrs{h.uplink, h.veth} {
			h.removeAddrs(t, link, f)
		}
		route := &netlink.Route{Dst: alone(f.addr("remote")), LinkIndex: h.uplink.Index, Scope: netlink.SCOPE_LINK}
		if err := h.Netlink().RouteReplace(route); err != nil {
			t.Fatal(err)
		}
	}
	eachScene(t, nil, func(t *testing.T, s scene) {
		if err := h.masqueradesAs(s, nil, "", "no source"); err != nil {
			t.Error(err)
		}
	})
}

// removeAddrs removes all addresses but link-local ones.
func (h *host) removeAddrs(t *testing.T, link *netlink.LinkAttrs, f addressing) {
	t.Helper()
	kind := netlink.FAMILY_V4
	if f.name == "v6" {
		kind = netlink.FAMILY_V6
	}
	device := &netlink.Device{LinkAttrs: *link}
	addrs, err := rtnl.Addresses(h.Netlink(), device, kind)
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range addrs {
		if addr.IP.IsLinkLocalUnicast() {
			continue
		}
		if err := h.Netlink().AddrDel(device, &addr); err != nil {
			t.Fatal(err)
		}
	}
}

func (h *host) removeDefaultRoutes(t *testing.T) {
	t.Helper()
	for _, f := range addressings {
		bits := f.addr("any").BitLen()
		err := h.Netlink().RouteDel(&netlink.Route{
			Dst: &net.IPNet{IP: f.addr("any").AsSlice(), Mask: net.CIDRMask(0, bits)}, Gw: f.addr("gateway").AsSlice(),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
