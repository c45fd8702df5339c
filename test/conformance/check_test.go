package conformance

import (
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// difference is damage that CHECK must report.
type difference struct {
	name   string
	damage func(t *testing.T, p *pod, result *types100.Result)
	words  []string // in the error
}

// checkConf uses everything that CHECK verifies.
func checkConf() object {
	conf := with(dual("1.1.0"), "runtimeConfig.portMappings", webPort)
	conf = with(conf, "nonMasqueradeCIDRs", list{"172.16.0.0/12"})
	conf = with(conf, "runtimeConfig.aliases", list{"web"})
	conf = with(conf, "sysctl", object{"net.core.somaxconn": "500"})
	conf = with(with(conf, "txQLen", 77), "ingressRate", 100000000)
	return with(conf, "ipam.routes", list{
		object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"},
		object{"dst": "198.18.0.0/15", "mtu": 1300, "advmss": 1200, "priority": 50, "table": 100},
		object{"dst": "198.51.100.0/24", "scope": 253},
		object{"dst": "203.0.113.0/24", "gw": "10.88.0.99"}, object{"dst": "203.0.114.0/24", "gw": "192.0.2.1"},
	})
}

// repairHint is in the error for a difference that ebpfnetctl repairs.
const repairHint = "ebpfnetctl repair"

func TestCheck(t *testing.T) {
	checkFinds(t, checkConf(), []difference{
		{"interface deleted", deleteInterface, []string{"eth0"}},
		{"pair deleted", inContainer((*netlink.Handle).LinkDel), []string{"no interface eth0", "no device ebpf"}},
		{"interface down", inContainer((*netlink.Handle).LinkSetDown), []string{"eth0", "down"}},
		{"IPv4 address removed", removeAddress(0), []string{"eth0", "10.88.0."}},
		{"IPv6 address removed", removeAddress(1), []string{"eth0", "fd00:88::"}},
		{"IPv4 route removed", removeRoute("0.0.0.0/0"), []string{"route", "0.0.0.0/0"}},
		{"IPv6 route removed", removeRoute("::/0"), []string{"route", "::/0"}},
		{"subnet's route removed", removeRoute("10.88.0.0/16"), []string{"lacks the route to 10.88.0.0/16"}},
		{"gateway's route removed", removeRoute("fd00:88::1/128"), []string{"lacks the route to fd00:88::1/128"}},
		{"other gateway", changeRoute("0.0.0.0/0", func(r *netlink.Route) { r.Gw = net.IP{10, 88, 99, 99}; r.SetFlag(netlink.FLAG_ONLINK) }),
			[]string{"route to 0.0.0.0/0", "gateway 10.88.99.99, expected 10.88.0.1"}},
		{"route with another mtu", changeRoute("198.18.0.0/15", func(r *netlink.Route) { r.MTU = 1400 }), []string{"198.18.0.0/15", "mtu 1400, expected 1300"}},
		{"route with another advmss", changeRoute("198.18.0.0/15", func(r *netlink.Route) { r.AdvMSS = 1000 }), []string{"198.18.0.0/15", "advmss 1000, expected 1200"}},
		{"route with another priority", changeRoute("198.18.0.0/15", func(r *netlink.Route) { r.Priority = 51 }), []string{"198.18.0.0/15", "priority 51, expected 50"}},
		{"route in another table", changeRoute("198.18.0.0/15", func(r *netlink.Route) { r.Table = 101 }), []string{"lacks the route to 198.18.0.0/15"}},
		{"route of another scope", changeRoute("198.51.100.0/24", func(r *netlink.Route) { r.Scope = 200 }), []string{"198.51.100.0/24", "scope 200, expected 253"}},
		{"MAC changed", inContainer(setMAC), []string{"MAC of eth0 in the container", "02:00:00:00:00:09"}},
		{"MTU raised", inContainer(setMTU(9000)), []string{"MTU of eth0 in the container: 9000, expected 1500"}},
		{"sysctl changed", func(t *testing.T, p *pod, _ *types100.Result) {
			setSysctl(t, p.Namespace, "net/core/somaxconn", "501")
		},
			[]string{"somaxconn is 501, expected 500"}},
		{"queue changed", inContainer(func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetTxQLen(l, 78) }), []string{"txQLen is 78, expected 77"}},

		{"host's end down", onHost((*netlink.Handle).LinkSetDown), []string{"ebpf", "down"}},
		{"host's MAC changed", onHost(setMAC), []string{"MAC of ebpf", "02:00:00:00:00:09"}},
		{"host's MTU changed", onHost(setMTU(1300)), []string{"MTU of ebpf", "1300, expected 1500"}},
		{"alias changed", onHost(func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetAlias(l, "mine") }), []string{`"mine"`, `"ebpfnet pods c1 eth0"`}},
		{"gateway's address removed", removeGateway, []string{"ebpf", "gateway", "10.88.0.1"}},
		{"host's route removed", removeHostRoute, []string{"route", "fd00:88::", "ebpf"}},
		{"IPv4 forwarding off", stopForwarding(testenv.IPv4), []string{"/proc/sys/net/ipv4/ip_forward", repairHint}},
		{"IPv6 forwarding off", stopForwarding(testenv.IPv6), []string{"/proc/sys/net/ipv6/conf/all/forwarding", repairHint}},

		{"endpoint removed", removeEntries((*maps.Store).Release), []string{"10.88.0.", "fd00:88::"}},
		{"another container's configuration", func(_ *testing.T, p *pod, _ *types100.Result) { p.id = "c2" },
			[]string{"10.88.0.", "another container's", "no device ebpf", "not reserved"}},
		{"other masquerading", withExpected("ipMasq6", false), []string{"masquerading of fd00:88::", "is true, expected false"}},
		{"other masqTunnels", withExpected("masqTunnels", true), []string{"masquerading of tunnels from 10.88.0.", "is false, expected true (masqTunnels)"}},
		{"other antiSpoof", withExpected("antiSpoof", false), []string{"antiSpoof is true, expected false"}},
		{"other ingressPolicy", withExpected("ingressPolicy", "isolated"), []string{"other ingress rules than policy, policyMode, and ingressPolicy say"}},
		{"other fastPath", withExpected("fastPath", "never"), []string{"fastPath of 10.88.0.", "is auto, expected never"}},
		{"other rate", withExpected("ingressRate", 200000000), []string{"ebpf", "is not limited to ingressRate 200000000"}},
		{"queue removed", onHost(removeQueue), []string{"ebpf", "is not limited to ingressRate 100000000"}},
		{"other nonMasqueradeCIDRs", func(_ *testing.T, p *pod, _ *types100.Result) {
			p.conf = with(p.conf, "nonMasqueradeCIDRs", list{"10.0.0.0/8"})
		}, []string{"10.88.0.", "other nonMasqueradeCIDRs"}},
		{"nonMasqueradeCIDRs removed", clearPrefixes, []string{"172.16.0.0/12", "nonMasqueradeCIDRs"}},
		{"gateway's entry removed", clearPrefixes, []string{"203.0.113.0/24 via 10.88.0.99"}},
		{"ports removed", removeEntries((*maps.Store).CloseHostPorts), []string{"port", "0.0.0.0:8080", "[::]:8080"}},
		{"other container port", func(_ *testing.T, p *pod, _ *types100.Result) {
			p.conf = with(p.conf, "runtimeConfig.portMappings", list{object{"hostPort": 8080, "containerPort": 81}})
		}, []string{"host port", ":80, expected", ":81"}},

		{"program removed from the host's end", removeFilter, []string{"ebpf", "programs", repairHint}},
		{"reservation removed", removeReservation, []string{"10.88.0.", "not reserved"}},
		{"additional reservation", func(t *testing.T, _ *pod, _ *types100.Result) { writeReservation(t, "10.88.77.7", "c1\r\neth0") },
			[]string{"10.88.77.7", "missing from prevResult"}},
		{"other record", func(_ *testing.T, p *pod, _ *types100.Result) {
			p.conf = with(p.conf, "runtimeConfig.aliases", list{"db"})
		}, []string{"record", record.DefaultDir, "aliases"}},
		{"record removed", func(t *testing.T, _ *pod, _ *types100.Result) {
			testenv.Must(t, os.RemoveAll(record.DefaultDir))
		}, []string{"record", record.DefaultDir, "aliases"}},
	})
}

func TestCheckPrograms(t *testing.T) {
	testenv.Require(t, testenv.TCX) // clsact has no links to detach
	checkFinds(t, checkConf(), []difference{
		{"program detached from the uplink by force", forceDetach("uplink-*-from_uplink"), []string{"uplink eth0", "programs", repairHint}},
		{"program detached from lo", removePin("loopback-to_loopback"), []string{"loopback", "program", repairHint}},
	})
}

func checkFinds(t *testing.T, conf object, differences []difference) {
	t.Helper()
	h := newHost(t)
	for _, test := range differences {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", conf)
			before := h.snapshot(t, p.Namespace)
			result := p.add(t)
			wantSuccess(t, p.try(t, "CHECK"), "")
			test.damage(t, p, result)
			call := p.try(t, "CHECK")
			wantError(t, call, cnierr.CodeDiffers, append(test.words, "DEL and ADD")...)
			if slices.Contains(test.words, repairHint) {
				wantRepaired(t, p, call)
			}
			p.conf, p.id = conf, "c1"
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// wantRepaired runs the repair that CHECK's only difference suggests, and wants CHECK to succeed.
func wantRepaired(t *testing.T, p *pod, call *testenv.Call) {
	t.Helper()
	if found := strings.Count(call.Err().(*types.Error).Msg, "; ") + 1; found != 1 {
		t.Errorf("differences of CHECK: got %d, want 1: %v", found, call.Err())
	}
	p.host.wantCtl(t, 0, []string{"repair"})
	wantSuccess(t, p.try(t, "CHECK"), "")
}

// TestCheckPrevResult passes CHECK results that do not belong to the container.
func TestCheckPrevResult(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	p.add(t)
	good := p.result

	for _, test := range []struct {
		name  string
		prev  object
		code  uint
		words []string
	}{
		{"missing", nil, codeInvalidConfig, []string{"prevResult"}},
		{"invalid", with(good, "ips", "none"), codeInvalidConfig, []string{"prevResult"}},
		{"without the interface", with(good, "interfaces", list{}), cnierr.CodeDiffers, []string{"prevResult", "eth0"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p.result = test.prev
			wantError(t, p.try(t, "CHECK"), test.code, test.words...)
		})
	}
	p.result = good
	wantSuccess(t, p.try(t, "CHECK"), "")
}

// TestCheckTolerates checks that CHECK accepts what later plugins may have added. It must not accept a container
// that was never added.
func TestCheckTolerates(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("0.4.0"))
	p.add(t)
	extra, _ := netlink.ParseAddr("10.99.0.1/32")
	testenv.Must(t, p.Netlink().AddrAdd(p.device(t), extra))
	_, prefix, _ := net.ParseCIDR("198.18.0.0/15")
	testenv.Must(t, p.Netlink().RouteAdd(&netlink.Route{Dst: prefix, LinkIndex: p.device(t).Attrs().Index}))
	wantSuccess(t, p.try(t, "CHECK"), "")

	unknown := h.pod(t, "c2", dual("1.0.0"))
	unknown.result = with(p.result, "cniVersion", "1.0.0")
	if call := unknown.try(t, "CHECK"); call.Exit == 0 {
		t.Error("CHECK of an unknown container: got success, want an error")
	} else if !strings.Contains(string(call.Stdout), "eth0") {
		t.Errorf("CHECK of an unknown container: got %s, want it to name eth0", call.Stdout)
	}
}
