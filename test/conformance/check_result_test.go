package conformance

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A laterPlugin changes a container after ADD, and the result with it.
type laterPlugin struct {
	name   string
	change func(t *testing.T, p *pod, result *types100.Result)
}

// laterPlugins are changes that plugins after ebpfnet make, like tuning, route-override and static.
var laterPlugins = []laterPlugin{
	{"MAC", func(t *testing.T, p *pod, result *types100.Result) {
		testenv.Must(t, setMAC(p.Netlink(), p.device(t)))
		result.Interfaces[1].Mac = p.device(t).Attrs().HardwareAddr.String()
	}},
	{"larger MTU", func(t *testing.T, p *pod, result *types100.Result) {
		testenv.Must(t, p.Netlink().LinkSetMTU(p.device(t), 9000))
		result.Interfaces[1].Mtu = 9000
	}},
	{"smaller MTU", func(t *testing.T, p *pod, result *types100.Result) {
		testenv.Must(t, p.Netlink().LinkSetMTU(p.device(t), 1400))
		result.Interfaces[1].Mtu = 1400
	}},
	{"route by another interface", func(t *testing.T, p *pod, result *types100.Result) {
		other := p.addInterface(t, result)
		dst := prefix(t, "198.18.0.0/15")
		testenv.Must(t, p.Netlink().RouteAdd(&netlink.Route{Dst: &dst, LinkIndex: other.Attrs().Index}))
		result.Routes = append(result.Routes, newRoute(dst, nil))
	}},
	{"default route by another interface", func(t *testing.T, p *pod, result *types100.Result) {
		other := p.addInterface(t, result)
		p.flushRoutes(t)
		dst := prefix(t, "0.0.0.0/0")
		testenv.Must(t, p.Netlink().RouteAdd(&netlink.Route{Dst: &dst, LinkIndex: other.Attrs().Index}))
		result.Routes = []*types.Route{newRoute(dst, nil)}
	}},
	{"other routes", func(t *testing.T, p *pod, result *types100.Result) {
		p.flushRoutes(t)
		dst, gateway := prefix(t, "198.18.0.0/15"), net.IP{10, 88, 99, 99}
		testenv.Must(t, p.Netlink().RouteAdd(&netlink.Route{Dst: &dst, LinkIndex: p.device(t).Attrs().Index, Gw: gateway, Flags: int(netlink.FLAG_ONLINK)}))
		result.Routes = []*types.Route{newRoute(dst, gateway)}
	}},
	{"no routes", func(t *testing.T, p *pod, result *types100.Result) {
		p.flushRoutes(t)
		result.Routes = nil
	}},
	{"additional address", func(t *testing.T, p *pod, result *types100.Result) {
		more := prefix(t, "10.99.0.7/24")
		testenv.Must(t, p.Netlink().AddrAdd(p.device(t), &netlink.Addr{IPNet: &more}))
		result.IPs = append(result.IPs, &types100.IPConfig{Interface: types100.Int(1), Address: more, Gateway: net.IP{10, 99, 0, 1}})
	}},
	{"other address", func(t *testing.T, p *pod, result *types100.Result) {
		testenv.Must(t, p.Netlink().AddrDel(p.device(t), &netlink.Addr{IPNet: &result.IPs[0].Address}))
		result.IPs[0] = &types100.IPConfig{Interface: types100.Int(1), Address: prefix(t, "10.99.0.7/24"), Gateway: net.IP{10, 99, 0, 1}}
		testenv.Must(t, p.Netlink().AddrAdd(p.device(t), &netlink.Addr{IPNet: &result.IPs[0].Address}))
		p.flushRoutes(t)
		result.Routes = nil
	}},
	{"no address", func(t *testing.T, p *pod, result *types100.Result) {
		for _, ip := range result.IPs {
			testenv.Must(t, p.Netlink().AddrDel(p.device(t), &netlink.Addr{IPNet: &ip.Address}))
		}
		p.flushRoutes(t)
		result.IPs, result.Routes = nil, nil
	}},
	{"other gateway", func(t *testing.T, p *pod, result *types100.Result) {
		result.IPs[0].Gateway = net.IP{10, 88, 99, 99}
		changeRoute("0.0.0.0/0", func(r *netlink.Route) { r.Gw = result.IPs[0].Gateway; r.SetFlag(netlink.FLAG_ONLINK) })(t, p, result)
	}},
	{"interfaces", func(t *testing.T, p *pod, result *types100.Result) {
		device := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "later0"}, PeerName: "later1"}
		testenv.Must(t, p.host.Node.Netlink().LinkAdd(device))
		t.Cleanup(func() { testenv.Must(t, p.host.Node.Netlink().LinkDel(device)) })
		p.addInterface(t, result)
		result.Interfaces = append(result.Interfaces, &types100.Interface{Name: "later0"})
	}},
	{"sandbox by another path", func(t *testing.T, p *pod, result *types100.Result) {
		result.Interfaces[1].Sandbox = filepath.Join(t.TempDir(), "container")
		testenv.Must(t, os.Symlink(p.Path, result.Interfaces[1].Sandbox))
	}},
}

// addInterface adds another interface to the container and to the result.
func (p *pod) addInterface(t *testing.T, result *types100.Result) netlink.Link {
	t.Helper()
	testenv.Must(t, p.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "net1"}, PeerName: "net2"}))
	for _, name := range []string{"net1", "net2"} {
		link, err := p.Netlink().LinkByName(name)
		testenv.Must(t, err)
		testenv.Must(t, p.Netlink().LinkSetUp(link))
	}
	link, err := p.Netlink().LinkByName("net1")
	testenv.Must(t, err)
	result.Interfaces = append(result.Interfaces, &types100.Interface{Name: "net1", Sandbox: p.Path})
	return link
}

// flushRoutes removes all routes of the container but the kernel's own.
func (p *pod) flushRoutes(t *testing.T) {
	t.Helper()
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := rtnl.Routes(p.Netlink(), family, &netlink.Route{LinkIndex: p.device(t).Attrs().Index}, netlink.RT_FILTER_OIF)
		testenv.Must(t, err)
		for _, route := range routes {
			if route.Protocol != 2 { // RTPROT_KERNEL
				testenv.Must(t, p.Netlink().RouteDel(&route))
			}
		}
	}
}

func newRoute(dst net.IPNet, gateway net.IP) *types.Route { return &types.Route{Dst: dst, GW: gateway} }

// checkable are the containers whose CHECK the tests here call: one alone, and one after another plugin.
var checkable = map[string]func(t *testing.T, h *host) *pod{
	"first": func(t *testing.T, h *host) *pod {
		t.Helper()
		return h.pod(t, "c1", with(with(dual("1.1.0"), "antiSpoof", false), "runtimeConfig.portMappings", webPort))
	},
	"chained": func(t *testing.T, h *host) *pod {
		t.Helper()
		p := h.chainedPod(t)
		p.conf = with(p.conf, "antiSpoof", false)
		t.Cleanup(func() { testenv.Must(t, h.Node.Netlink().LinkDel(p.peer(t))) })
		return p
	},
}

// checkWith calls CHECK with a result in the configuration's version.
func (p *pod) checkWith(t *testing.T, version string, result *types100.Result) *testenv.Call {
	t.Helper()
	converted, err := result.GetAsVersion(version)
	testenv.Must(t, err)
	p.conf, p.result = with(p.conf, "cniVersion", version), decode(t, encode(t, converted)).(object)
	return p.try(t, "CHECK")
}

// TestCheckAfterLaterPlugin changes the container and the result, as a later plugin does. CHECK gets that result, and
// expects what it says.
func TestCheckAfterLaterPlugin(t *testing.T) {
	h := newHost(t)
	for position, newPod := range checkable {
		for _, later := range laterPlugins {
			t.Run(position+" "+later.name, func(t *testing.T) {
				p := newPod(t, h)
				result := p.add(t)
				later.change(t, p, result)
				for _, version := range []string{"0.4.0", "1.0.0", "1.1.0"} {
					wantSuccess(t, p.checkWith(t, version, result), "")
				}
				result.Interfaces = append(result.Interfaces, &types100.Interface{Name: "vhost", SocketPath: "/run/vhost.sock"})
				wantSuccess(t, p.checkWith(t, "1.1.0", result), "")
				p.del(t)
			})
		}
	}
}

// TestCheckOtherResult passes CHECK a result that is not this container's.
func TestCheckOtherResult(t *testing.T) {
	h := newHost(t)
	other := h.pod(t, "c2", dual("1.1.0"))
	hostOfOther := other.add(t).Interfaces[0].Name
	files := noNamespaces(t)
	for position, newPod := range checkable {
		p := newPod(t, h)
		own := p.add(t)
		for _, test := range []struct {
			name   string
			change func(result *types100.Result)
			words  []string
		}{
			{"sandbox of another container", func(r *types100.Result) { r.Interfaces[1].Sandbox = other.Path }, []string{"sandbox", "eth0", other.Path, p.Path}},
			{"sandbox of the host", func(r *types100.Result) { r.Interfaces[1].Sandbox = h.Node.Path }, []string{"sandbox", h.Node.Path}},
			{"sandbox that is gone", func(r *types100.Result) { r.Interfaces[1].Sandbox = files["absent"] }, []string{"sandbox", files["absent"]}},
			{"sandbox that is a FIFO", func(r *types100.Result) { r.Interfaces[1].Sandbox = files["fifo"] }, []string{"sandbox", files["fifo"]}},
			{"sandbox of another interface", func(r *types100.Result) {
				r.Interfaces = append(r.Interfaces, &types100.Interface{Name: "net1", Sandbox: other.Path})
			}, []string{"sandbox", "net1", other.Path}},
			{"device of another container", func(r *types100.Result) { r.Interfaces[0].Name = hostOfOther }, []string{hostOfOther, "another container"}},
			{"one more device of another container", func(r *types100.Result) {
				r.Interfaces = append(r.Interfaces, &types100.Interface{Name: hostOfOther})
			}, []string{hostOfOther, "another container"}},
			{"no such device", func(r *types100.Result) { r.Interfaces[0].Name = "bogus0" }, []string{"bogus0"}},
			{"a device's name as no kernel has it", func(r *types100.Result) { r.Interfaces[0].Name = "no such device\x1b[2J" }, []string{`no such device\x1b[2J`}},
			{"additional address", func(r *types100.Result) {
				r.IPs = append(r.IPs, &types100.IPConfig{Interface: types100.Int(1), Address: prefix(t, "10.99.0.7/24")})
			}, []string{"eth0", "lacks address 10.99.0.7"}},
			{"address of another container", func(r *types100.Result) {
				r.IPs = append(r.IPs, &types100.IPConfig{Interface: types100.Int(1), Address: prefix(t, "10.88.0.2/16")})
			}, []string{"10.88.0.2", "another container's"}},
			{"additional route", func(r *types100.Result) {
				r.Routes = append(r.Routes, newRoute(prefix(t, "198.18.0.0/15"), nil))
			}, []string{"lacks the route to 198.18.0.0/15"}},
			{"other gateway of a route", func(r *types100.Result) {
				r.Routes = append(r.Routes, newRoute(prefix(t, "0.0.0.0/0"), net.IP{10, 88, 99, 99}))
			}, []string{"route to 0.0.0.0/0", "expected 10.88.99.99"}},
			{"other MAC", func(r *types100.Result) { r.Interfaces[1].Mac = "02:00:00:00:00:99" }, []string{"MAC of eth0", "02:00:00:00:00:99"}},
		} {
			t.Run(position+" "+test.name, func(t *testing.T) {
				for _, version := range []string{"0.4.0", "1.1.0"} {
					changed := *own
					changed.Interfaces = nil
					for _, i := range own.Interfaces {
						changed.Interfaces = append(changed.Interfaces, i.Copy())
					}
					test.change(&changed)
					wantError(t, p.checkWith(t, version, &changed), cnierr.CodeDiffers, test.words...)
				}
			})
		}
		t.Run(position+" own", func(t *testing.T) { wantSuccess(t, p.checkWith(t, "1.1.0", own), "") })
		if position == "first" {
			t.Run("first, a device of the host instead of ours", func(t *testing.T) {
				changed := *own
				changed.Interfaces = []*types100.Interface{{Name: "eth0"}, own.Interfaces[1]}
				wantError(t, p.checkWith(t, "1.1.0", &changed), cnierr.CodeDiffers, "lacks the host's device "+own.Interfaces[0].Name)
			})
		}
		p.del(t)
	}
}
