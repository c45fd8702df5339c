package conformance

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// loopbackResult is the result of the loopback plugin in a version of the specification.
func loopbackResult(t *testing.T, p *pod, version string) object {
	t.Helper()
	result := &types100.Result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{{Name: "lo", Mac: "00:00:00:00:00:00", Sandbox: p.Path}},
		IPs: []*types100.IPConfig{
			{Interface: types100.Int(0), Address: prefix(t, "127.0.0.1/8")},
			{Interface: types100.Int(0), Address: prefix(t, "::1/128")},
		},
	}
	result.DNS.Nameservers = []string{"192.0.2.53"}
	converted, err := result.GetAsVersion(version)
	testenv.Must(t, err)
	return decode(t, encode(t, converted)).(object)
}

func prefix(t *testing.T, text string) net.IPNet {
	t.Helper()
	ip, prefix, err := net.ParseCIDR(text)
	testenv.Must(t, err)
	return net.IPNet{IP: ip, Mask: prefix.Mask}
}

// TestAfterLoopback adds a container's own interface to the result of a plugin that made another one.
func TestAfterLoopback(t *testing.T) {
	h := newHost(t)
	for _, version := range version.All.SupportedVersions() {
		t.Run(version, func(t *testing.T) {
			removeReservations(t)
			p := h.pod(t, "c1", with(with(dual(version), "mtu", 1400), "runtimeConfig.portMappings", webPort))
			before := h.snapshot(t, p.Namespace)
			prev := loopbackResult(t, p, version)
			conf := p.conf
			p.conf = with(conf, "prevResult", prev)
			result := p.add(t)
			own := addresses(result)[:2]
			if got := fmt.Sprint(own); got != "[10.88.0.2 fd00:88::2]" {
				t.Errorf("first addresses: got %s, want the container's", got)
			}
			wantPing(t, h.Node, own...)
			wantPing(t, p.Namespace, testenv.OutsideAddr4)
			if got := fmt.Sprint(result.DNS.Nameservers); got != "[192.0.2.53]" {
				t.Errorf("name servers: got %s, want that of prevResult", got)
			}
			p.conf = conf
			if prev["interfaces"] != nil {
				wantAdded(t, p, result)
			}
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// wantAdded wants a result of 0.3.0 or later to have the loopback device and ours, each with its own addresses, and
// CHECK, where the version has it, to take it as the final result.
func wantAdded(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	of := map[string][]string{}
	for _, i := range result.Interfaces {
		if i.Name == "lo" || i.Name == "eth0" {
			of[i.Name] = []string{i.Sandbox}
		}
	}
	for _, ip := range result.IPs {
		name := result.Interfaces[*ip.Interface].Name
		of[name] = append(of[name], ip.Address.String())
	}
	want := map[string][]string{"lo": {p.Path, "127.0.0.1/8", "::1/128"}, "eth0": {p.Path, "10.88.0.2/16", "fd00:88::2/64"}}
	if fmt.Sprint(of) != fmt.Sprint(want) || len(result.Interfaces) != 3 {
		t.Errorf("interfaces: got %v of %v, want %v and the host's end", of, result.Interfaces, want)
	}
	if version := p.conf["cniVersion"].(string); !strings.HasPrefix(version, "0.3.") {
		wantSuccess(t, p.try(t, "CHECK"), "")
	}
}

// TestAfterInterface refuses an interface that the plugin before has made, and leaves it alone.
func TestAfterInterface(t *testing.T) {
	h := newHost(t)
	p := h.chainedPod(t)
	before := h.snapshot(t, p.Namespace)
	p.conf = with(p.conf, "ipam", dual("1.1.0")["ipam"])
	wantError(t, p.try(t, "ADD"), codeUnsupported, "prevResult.interfaces", "eth0", `"ipam"`)
	h.wantUnchanged(t, before, p.Namespace)

	p.conf = with(with(p.conf, "ipam", absent), "prevResult.interfaces", list{object{"name": "lo", "sandbox": p.Path}})
	wantError(t, p.try(t, "ADD"), codeInvalidConfig, "prevResult.interfaces", "eth0", `"ipam"`)
	h.wantUnchanged(t, before, p.Namespace)
}

// TestChainedOldResults follows another plugin in each version that has no CHECK. Results up to 0.2.0 name no
// interface: their addresses are those of CNI_IFNAME. The result passes unchanged.
func TestChainedOldResults(t *testing.T) {
	h := newHost(t)
	for _, version := range []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1"} {
		t.Run(version, func(t *testing.T) {
			p := h.chainedPod(t)
			before := h.snapshot(t, p.Namespace)
			prev := parseResult(t, encode(t, p.conf["prevResult"]))
			converted, err := prev.GetAsVersion(version)
			testenv.Must(t, err)
			p.conf = with(with(p.conf, "prevResult", converted), "cniVersion", version)
			result := p.add(t)
			if got, want := string(encode(t, p.result)), string(encode(t, decode(t, encode(t, converted)))); got != want {
				t.Errorf("result: got %s, want that of the plugin before: %s", got, want)
			}
			if want := []netip.Addr{netip.MustParseAddr("10.88.0.9")}; !slices.Equal(addresses(result), want) {
				t.Errorf("addresses: got %v, want %v", addresses(result), want)
			}
			wantFetch(t, h, p.Namespace, result)
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
			testenv.Must(t, h.Node.Netlink().LinkDel(p.peer(t)))
		})
	}
}
