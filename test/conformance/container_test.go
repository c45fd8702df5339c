package conformance

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestContainer compares the container with what the result says of it.
func TestContainer(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	setLoopbackDown(t, p)
	result := p.add(t)

	if len(result.Interfaces) != 2 || result.Interfaces[0].Sandbox != "" || result.Interfaces[1].Sandbox != p.Path {
		t.Fatalf("interfaces are %v, want the host's and the container's", result.Interfaces)
	}
	compareDevice(t, p.hostDevice(t, result), result.Interfaces[0])
	compareDevice(t, p.device(t), result.Interfaces[1])
	compareAddresses(t, p, result)
	compareRoutes(t, p, result)
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
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Netlink().LinkSetDown(lo); err != nil {
		t.Fatal(err)
	}
}

func compareDevice(t *testing.T, device netlink.Link, want *types100.Interface) {
	t.Helper()
	attrs := device.Attrs()
	got := types100.Interface{Name: attrs.Name, Mac: attrs.HardwareAddr.String(), Mtu: attrs.MTU, Sandbox: want.Sandbox}
	if got != *want {
		t.Errorf("device is %v, result says %v", got, *want)
	}
	if attrs.Flags&net.FlagUp == 0 {
		t.Errorf("%s is down", attrs.Name)
	}
}

func compareAddresses(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	addrs, err := p.Netlink().AddrList(p.device(t), netlink.FAMILY_ALL)
	if err != nil {
		t.Fatal(err)
	}
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
		t.Errorf("addresses of the container are %v, result says %v", present, reported)
	}
}

func compareRoutes(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	for _, want := range result.Routes {
		if _, err := p.Netlink().RouteGet(want.Dst.IP); err != nil {
			t.Errorf("route to %s: %v", &want.Dst, err)
		}
		family := netlink.FAMILY_V4
		if want.Dst.IP.To4() == nil {
			family = netlink.FAMILY_V6
		}
		routes, err := p.Netlink().RouteListFiltered(family, &netlink.Route{Dst: &want.Dst}, netlink.RT_FILTER_DST)
		if err != nil || len(routes) != 1 || routes[0].LinkIndex != p.device(t).Attrs().Index {
			t.Errorf("routes to %s are %v (%v)", &want.Dst, routes, err)
		}
	}
}

// TestRouteFields holds ADD to apply what a route of the configuration says, not only to echo it.
func TestRouteFields(t *testing.T) {
	h := newHost(t)
	route := object{"dst": "198.18.0.0/15", "gw": "10.88.0.1", "mtu": 1300, "advmss": 1200, "priority": 50, "table": 100}
	p := h.pod(t, "c1", with(single("1.1.0"), "ipam.routes", list{route}))
	p.add(t)
	filter := &netlink.Route{Table: 100}
	routes, err := p.Netlink().RouteListFiltered(netlink.FAMILY_V4, filter, netlink.RT_FILTER_TABLE)
	if err != nil || len(routes) != 1 {
		t.Fatalf("routes of table 100 are %v (%v)", routes, err)
	}
	got := routes[0]
	if got.Dst.String() != "198.18.0.0/15" || got.Gw.String() != "10.88.0.1" || got.MTU != 1300 || got.AdvMSS != 1200 || got.Priority != 50 {
		t.Errorf("route is %+v", got)
	}
	wantSuccess(t, p.try(t, "CHECK"), "")
}

func TestMTU(t *testing.T) {
	h := newHost(t)
	uplink, err := h.Node.Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Node.Netlink().LinkSetMTU(uplink, 1450); err != nil {
		t.Fatal(err)
	}
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
					t.Errorf("MTU of %s is %d, in the result %d, want %d", device.Attrs().Name, got, result.Interfaces[i].Mtu, test.want)
				}
			}
		})
	}
}

func TestDNS(t *testing.T) {
	h := newHost(t)
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(resolvConf, []byte("nameserver 192.0.2.53\nsearch a.test b.test\noptions ndots:2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	fromFile := with(single("1.1.0"), "ipam.resolvConf", resolvConf)
	fromConfig := with(fromFile, "dns", object{"nameservers": list{"192.0.2.54"}, "domain": "c.test", "search": list{"c.test"}, "options": list{"edns0"}})
	fromRuntime := with(fromConfig, "runtimeConfig.dns", object{"servers": list{"192.0.2.55"}, "searches": list{"d.test"}, "options": list{"trust-ad"}})
	for _, test := range []struct {
		name string
		conf object
		want types.DNS
	}{
		{"none", single("1.1.0"), types.DNS{}},
		{"of ipam.resolvConf", fromFile, types.DNS{Nameservers: []string{"192.0.2.53"}, Search: []string{"a.test", "b.test"}, Options: []string{"ndots:2"}}},
		{"of the configuration", fromConfig, types.DNS{Nameservers: []string{"192.0.2.54"}, Domain: "c.test", Search: []string{"c.test"}, Options: []string{"edns0"}}},
		{"of the runtime", fromRuntime, types.DNS{Nameservers: []string{"192.0.2.55"}, Search: []string{"d.test"}, Options: []string{"trust-ad"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := h.pod(t, "c1", test.conf).add(t).DNS; !reflect.DeepEqual(got, test.want) {
				t.Errorf("dns is %+v, want %+v", got, test.want)
			}
		})
	}
}
