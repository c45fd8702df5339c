package conformance

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestContainer compares the container with ADD's result.
func TestContainer(t *testing.T) {
	h := newLoadingHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	setLoopbackDown(t, p)
	result := p.add(t)

	if len(result.Interfaces) != 2 || result.Interfaces[0].Sandbox != "" || result.Interfaces[1].Sandbox != p.Path {
		t.Fatalf("interfaces: got %v, want the host's and the container's", result.Interfaces)
	}
	compareDevice(t, p.hostDevice(t, result), result.Interfaces[0])
	compareDevice(t, p.device(t), result.Interfaces[1])
	compareAddresses(t, p, result)
	compareRoutes(t, p, result)
	wantGateways(t, p, result)
	lo, err := p.Netlink().LinkByName("lo")
	if err != nil || lo.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("lo of the container is down: %v, %v", lo, err)
	}
	wantPing(t, p.Namespace, netip.MustParseAddr("127.0.0.1"), testenv.OutsideAddr4, testenv.OutsideAddr6)
	for _, ip := range result.IPs {
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		wantPing(t, p.Namespace, gateway.Unmap())
	}
	wantPing(t, h.Node, addresses(result)...)
}

func setLoopbackDown(t *testing.T, p *pod) {
	t.Helper()
	lo, err := p.Netlink().LinkByName("lo")
	testenv.Must(t, err)
	testenv.Must(t, p.Netlink().LinkSetDown(lo))
}

func compareDevice(t *testing.T, device netlink.Link, want *types100.Interface) {
	t.Helper()
	attrs := device.Attrs()
	got := types100.Interface{Name: attrs.Name, Mac: attrs.HardwareAddr.String(), Mtu: attrs.MTU, Sandbox: want.Sandbox}
	if got != *want {
		t.Errorf("device: got %v, result has %v", got, *want)
	}
	if attrs.Flags&net.FlagUp == 0 {
		t.Errorf("%s is down", attrs.Name)
	}
}

func compareAddresses(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	addrs, err := rtnl.Addresses(p.Netlink(), p.device(t), netlink.FAMILY_ALL)
	testenv.Must(t, err)
	present := map[string]bool{}
	for _, addr := range addrs {
		if !addr.IP.IsLinkLocalUnicast() {
			present[addr.IPNet.String()] = true
		}
	}
	reported := map[string]bool{}
	for _, ip := range result.IPs {
		reported[ip.Address.String()] = true
	}
	if !reflect.DeepEqual(present, reported) {
		t.Errorf("addresses of the container: got %v, result has %v", present, reported)
	}
}

func compareRoutes(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	for _, want := range result.Routes {
		if _, err := p.Netlink().RouteGet(want.Dst.IP); err != nil {
			t.Errorf("route to %s: %v", &want.Dst, err)
		}
		routes, err := rtnl.Routes(p.Netlink(), nl.GetIPFamily(want.Dst.IP), &netlink.Route{Dst: &want.Dst}, netlink.RT_FILTER_DST)
		if err != nil || len(routes) != 1 || routes[0].LinkIndex != p.device(t).Attrs().Index {
			t.Errorf("routes to %s: got %v (%v), want one by the interface", &want.Dst, routes, err)
		}
	}
}

// wantGateways wants that the container need not ask for the gateways' MAC address: who asks early gets no answer.
func wantGateways(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	for _, ip := range result.IPs {
		neighbors, err := rtnl.Neighbors(p.Netlink(), p.device(t).Attrs().Index, nl.GetIPFamily(ip.Gateway))
		testenv.Must(t, err)
		if !slices.ContainsFunc(neighbors, func(n netlink.Neigh) bool {
			return n.IP.Equal(ip.Gateway) && n.HardwareAddr.String() == result.Interfaces[0].Mac
		}) {
			t.Errorf("neighbors: got %v, want %s with %s", neighbors, ip.Gateway, result.Interfaces[0].Mac)
		}
	}
}

// TestRouteFields checks that ADD applies every field of a configured route, and reports it.
func TestRouteFields(t *testing.T) {
	const onLink, global = int(netlink.SCOPE_LINK), int(netlink.SCOPE_UNIVERSE)

	h := newHost(t)
	for _, test := range []struct {
		name  string
		route object
		want  string // gateway, mtu, advmss, priority, table, scope
	}{
		{"gateway of the address", object{"dst": "198.18.0.0/15"}, "10.88.0.1 0 0 0 254 0"},
		{"gateway", object{"dst": "198.18.0.0/15", "gw": "10.88.0.1"}, "10.88.0.1 0 0 0 254 0"},
		{"none", object{"dst": "198.18.0.0/15", "gw": "0.0.0.0"}, "10.88.0.1 0 0 0 254 0"},
		{"gateway of its own", object{"dst": "198.18.0.0/15", "gw": "10.88.0.99", "mtu": 1300, "advmss": 1200, "priority": 50, "table": 254, "scope": global}, "10.88.0.1 1300 1200 50 254 0"},
		{"link-local gateway of the host", object{"dst": "2001:db8:99::/48", "gw": "fe80::1"}, "fe80::1 0 0 1024 254 0"},
		{"gateway of its own for IPv6", object{"dst": "2001:db8:99::/48", "gw": "fd00:88::99"}, "fd00:88::1 0 0 1024 254 0"},
		{"mtu", object{"dst": "198.18.0.0/15", "mtu": 1300}, "10.88.0.1 1300 0 0 254 0"},
		{"advmss", object{"dst": "198.18.0.0/15", "advmss": 1200}, "10.88.0.1 0 1200 0 254 0"},
		{"priority", object{"dst": "198.18.0.0/15", "priority": 50}, "10.88.0.1 0 0 50 254 0"},
		{"table", object{"dst": "198.18.0.0/15", "table": 100}, "10.88.0.1 0 0 0 100 0"},
		{"scope of the link", object{"dst": "198.18.0.0/15", "scope": onLink}, "<nil> 0 0 0 254 253"},
		{"global scope", object{"dst": "198.18.0.0/15", "scope": global}, "10.88.0.1 0 0 0 254 0"},
		{"all", object{"dst": "198.18.0.0/15", "gw": "10.88.0.1", "mtu": 1300, "advmss": 1200, "priority": 50, "table": 100, "scope": global}, "10.88.0.1 1300 1200 50 100 0"},
		{"IPv6", object{"dst": "2001:db8:99::/48"}, "fd00:88::1 0 0 1024 254 0"},
		{"all of IPv6", object{"dst": "2001:db8:99::/48", "gw": "fd00:88::1", "mtu": 1300, "advmss": 1200, "priority": 50, "table": 100}, "fd00:88::1 1300 1200 50 100 0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", with(dual("1.1.0"), "ipam.routes", list{test.route}))
			result := p.add(t)
			got := routeTo(t, p, test.route["dst"].(string))
			if _, set := test.route["mtu"]; !set && got.Dst.IP.To4() == nil {
				got.MTU -= roomForJumbo(t, p)
			}
			if text := fmt.Sprint(got.Gw, got.MTU, got.AdvMSS, got.Priority, got.Table, int(got.Scope)); text != test.want {
				t.Errorf("route: got %s, want %s", text, test.want)
			}
			if reported := encode(t, result.Routes); !reflect.DeepEqual(decode(t, reported), decode(t, encode(t, list{test.route}))) {
				t.Errorf("routes in the result: got %s, want %s", reported, encode(t, test.route))
			}
			wantSuccess(t, p.try(t, "CHECK"), "")
		})
	}
}

// roomForJumbo returns the MTU of IPv6 routes that set none: 8 bytes less than the device's if packets may exceed
// 64 KiB, which leaves room for the jumbogram option, else 0.
func roomForJumbo(t *testing.T, p *pod) int {
	t.Helper()
	device := p.device(t).Attrs()
	if device.GSOMaxSize <= 1<<16 {
		return 0
	}
	return device.MTU - 8
}

// routeTo returns the container's only route to a network, in any table.
func routeTo(t *testing.T, p *pod, dst string) netlink.Route {
	t.Helper()
	_, prefix, err := net.ParseCIDR(dst)
	testenv.Must(t, err)
	routes, err := rtnl.Routes(p.Netlink(), nl.GetIPFamily(prefix.IP), &netlink.Route{Dst: prefix}, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
	if err != nil || len(routes) != 1 {
		t.Fatalf("routes to %s: got %v (%v), want one", dst, routes, err)
	}
	return routes[0]
}

// TestSharedGateway has two addresses of one subnet, with the same gateway.
func TestSharedGateway(t *testing.T) {
	h := newHost(t)
	h.path, _ = installIPAMScript(t, "scripted", `[ "$CNI_COMMAND" != ADD ] ||
		echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.88.0.7/24"}, {"address": "10.88.0.8/24"}]}'`)
	set := func(start, end string) list {
		return list{object{"subnet": "10.88.0.0/16", "rangeStart": start, "rangeEnd": end}}
	}
	for name, conf := range map[string]object{
		"configured": with(single("1.1.0"), "ipam.ranges", list{set("10.88.0.10", "10.88.0.99"), set("10.88.0.100", "10.88.0.199")}),
		"default":    with(single("1.1.0"), "ipam", object{"type": "scripted"}),
	} {
		t.Run(name, func(t *testing.T) {
			p := h.pod(t, "c1", conf)
			before := h.snapshot(t, p.Namespace)
			result := p.add(t)
			wantSuccess(t, p.try(t, "CHECK"), "")
			wantPing(t, h.Node, addresses(result)...)
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

func TestMTU(t *testing.T) {
	h := newHost(t)
	uplink, err := h.Node.Netlink().LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	testenv.Must(t, h.Node.Netlink().LinkSetMTU(uplink, 1450))
	for _, test := range []struct {
		name string
		mtu  any
		want int
	}{
		{"absent: the uplink's", absent, 1450},
		{"0: the uplink's", 0, 1450},
		{"smaller", 1400, 1400},
		{"larger", 9000, 9000},
		{"largest", 65535, 65535},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", with(dual("1.1.0"), "mtu", test.mtu))
			result := p.add(t)
			for i, device := range []netlink.Link{p.hostDevice(t, result), p.device(t)} {
				if got := device.Attrs().MTU; got != test.want || result.Interfaces[i].Mtu != test.want {
					t.Errorf("MTU of %s: got %d, %d in the result, want %d", device.Attrs().Name, got, result.Interfaces[i].Mtu, test.want)
				}
			}
		})
	}
}

// TestRouteMTU uses default routes with a smaller MTU than their device.
func TestRouteMTU(t *testing.T) {
	h := newHost(t)
	for i, f := range testenv.Families {
		want := []int{1400, 1380}[i] // the smaller one of both families
		uplink, err := h.Node.Netlink().LinkByName(testenv.UplinkName)
		testenv.Must(t, err)
		size := f.Outside.BitLen() / 8
		all := &net.IPNet{IP: make(net.IP, size), Mask: make(net.IPMask, size)}
		route := &netlink.Route{LinkIndex: uplink.Attrs().Index, Dst: all, Gw: f.Outside.AsSlice(), MTU: want}
		testenv.Must(t, h.Node.Netlink().RouteReplace(route))
		result := h.pod(t, fmt.Sprint("c", i), dual("1.1.0")).add(t)
		if got := result.Interfaces[1].Mtu; got != want {
			t.Errorf("MTU: got %d, want %d", got, want)
		}
	}
}

func TestDNS(t *testing.T) {
	h := newHost(t)
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	testenv.Must(t, os.WriteFile(resolvConf, []byte("nameserver 192.0.2.53\nsearch a.test b.test\noptions ndots:2\n"), 0o644))
	fromFile := with(single("1.1.0"), "ipam.resolvConf", resolvConf)
	fromConfig := with(fromFile, "dns", object{"nameservers": list{"192.0.2.54"}, "domain": "c.test", "search": list{"c.test"}, "options": list{"edns0"}})
	fromRuntime := with(fromConfig, "runtimeConfig.dns", object{"servers": list{"192.0.2.55"}, "searches": list{"d.test"}, "options": list{"trust-ad"}})
	for _, test := range []struct {
		name string
		conf object
		want types.DNS
	}{
		{"none", single("1.1.0"), types.DNS{}},
		{"ipam.resolvConf", fromFile, types.DNS{Nameservers: []string{"192.0.2.53"}, Search: []string{"a.test", "b.test"}, Options: []string{"ndots:2"}}},
		{"configuration", fromConfig, types.DNS{Nameservers: []string{"192.0.2.54"}, Domain: "c.test", Search: []string{"c.test"}, Options: []string{"edns0"}}},
		{"runtime", fromRuntime, types.DNS{Nameservers: []string{"192.0.2.55"}, Search: []string{"d.test"}, Options: []string{"trust-ad"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := h.pod(t, "c1", test.conf).add(t).DNS; !reflect.DeepEqual(got, test.want) {
				t.Errorf("dns: got %+v, want %+v", got, test.want)
			}
		})
	}
}

// decode parses JSON.
func decode(t *testing.T, text []byte) any {
	t.Helper()
	var value any
	testenv.Must(t, json.Unmarshal(text, &value))
	return value
}
