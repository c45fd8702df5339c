package conformance

import (
	"fmt"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// routesOf returns the routes with gateways that the datapath has.
func (h *host) routesOf(t *testing.T) (routes []string) {
	t.Helper()
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		sets, err := maps.GatewayRoutes(datapath)
		for _, set := range sets {
			for _, route := range set {
				routes = append(routes, route.String())
			}
		}
		return err
	})
	slices.Sort(routes)
	return routes
}

// TestGatewayRoutes follows the datapath's entries of routes with gateways from ADD to DEL and GC. Two
// containers share them.
func TestGatewayRoutes(t *testing.T) {
	h := newLoadedHost(t)
	conf := with(dual("1.1.0"), "ipam.routes", list{
		object{"dst": "0.0.0.0/0", "gw": "10.88.0.99", "priority": 20}, object{"dst": "0.0.0.0/0", "priority": 30}, object{"dst": "::/0"},
		object{"dst": "2001:db8:9::/48", "gw": "2001:db8:1::2"}, object{"dst": "198.18.0.0/15", "gw": "192.0.2.1"},
	})
	want := []string{"0.0.0.0/0 via 10.88.0.99", "2001:db8:9::/48 via 2001:db8:1::2"}
	wantRoutes := func(want ...string) {
		t.Helper()
		if got := h.routesOf(t); !slices.Equal(got, want) {
			t.Errorf("routes in the datapath: got %q, want %q", got, want)
		}
	}
	c1, c2, plain := h.pod(t, "c1", conf), h.pod(t, "c2", conf), h.pod(t, "c3", dual("1.1.0"))
	result := c1.add(t)
	c2.add(t)
	plain.add(t)
	wantRoutes(want...)
	if got := fmt.Sprint(result.Routes[0].GW, result.Routes[1].GW); got != "10.88.0.99 <nil>" {
		t.Errorf("gateways in the result: got %s, want those of the configuration", got)
	}
	for _, p := range []*pod{c1, c2, plain} {
		wantSuccess(t, p.try(t, "CHECK"), "")
	}
	h.wantCtl(t, 0, []string{"attachments", c1.id}, "- dst: 0.0.0.0/0\n      gw: 10.88.0.99", "- dst: 2001:db8:9::/48\n      gw: 2001:db8:1::2")
	// More specific routes to the host hide the one to everything.
	wantPing(t, c1.Namespace, testenv.IPv4.Gateway, addresses(result)[0].Next())

	c1.del(t)
	wantRoutes(want...)
	c2.vanish(t)
	h.gc(t, with(conf, "cni.dev/valid-attachments", attachments("c3")))
	wantRoutes()
}

// TestGatewayOnUplink has its gateway on an uplink with a small MTU, which the route gets, and then on a device
// that is no uplink.
func TestGatewayOnUplink(t *testing.T) {
	h := newHost(t)
	h.AddSecondUplink(t)
	testenv.Must(t, h.Node.SetMTU(testenv.SecondUplinkName, 1300))
	conf := with(dual("1.1.0"), "ipam.routes", list{
		object{"dst": "203.0.113.0/24", "gw": testenv.SecondOutsideAddr4.String()}, object{"dst": "2001:db8:9::/48", "gw": testenv.SecondOutsideAddr6.String()},
		object{"dst": "203.0.114.0/24", "gw": testenv.SecondOutsideAddr4.String(), "mtu": 1280}, object{"dst": "203.0.115.0/24", "gw": testenv.OutsideAddr4.String()},
		object{"dst": "203.0.116.0/24", "gw": testenv.SecondOutsideAddr4.String(), "mtu": 1400},
	})
	refused := h.pod(t, "c1", with(conf, "uplinks", list{testenv.UplinkName}))
	wantError(t, refused.try(t, "ADD"), codeInvalidConfig, "ipam.routes[0]", "203.0.113.0/24", testenv.SecondOutsideAddr4.String(), "uplink")

	p := h.pod(t, "c2", conf)
	result := p.add(t)
	for dst, want := range map[string]int{
		"203.0.113.0/24": 1300, "2001:db8:9::/48": 1300, "203.0.114.0/24": 1280, "203.0.115.0/24": 0, "203.0.116.0/24": 1300,
	} {
		if got := routeTo(t, p, dst).MTU; got != want {
			t.Errorf("MTU of the route to %s: got %d, want %d", dst, got, want)
		}
	}
	if got := result.Routes[0].MTU; got != 0 {
		t.Errorf("MTU of the route in the result: got %d, want none, as in the configuration", got)
	}
	wantSuccess(t, p.try(t, "CHECK"), "")
}
