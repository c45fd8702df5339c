package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestAddressesUnavailable requests an address that another container has, and one from the smaller of two ranges, which is
// exhausted. STATUS reports that too, until an address is free again.
func TestAddressesUnavailable(t *testing.T) {
	h := newHost(t)
	conf := with(dual("1.1.0"), "ipam.ranges", list{
		list{object{"subnet": "10.88.0.0/29", "rangeStart": "10.88.0.3", "rangeEnd": "10.88.0.5"}},
		list{object{"subnet": "fd00:88::/64", "rangeStart": "fd00:88::2", "rangeEnd": "fd00:88::3"}},
	})
	const smaller = "fd00:88::2-fd00:88::3"
	first, second, third := h.pod(t, "c1", conf), h.pod(t, "c2", conf), h.pod(t, "c3", conf)
	empty := h.snapshot(t, first.Namespace, second.Namespace, third.Namespace)
	first.add(t)
	before := h.snapshot(t, second.Namespace)
	second.conf = with(conf, "runtimeConfig.ips", list{"10.88.0.3"})
	wantError(t, second.try(t, "ADD"), cnierr.CodeAddressTaken, "10.88.0.3", "c1")
	h.wantUnchanged(t, before, second.Namespace)
	wantSuccess(t, h.status(t, conf), "")

	second.conf = conf
	second.add(t)
	before = h.snapshot(t, third.Namespace)
	wantError(t, third.try(t, "ADD"), cnierr.CodeAddressesExhausted, smaller)
	wantError(t, h.status(t, conf), codeNotAvailable, smaller, "/var/lib/cni/networks/pods")
	h.wantUnchanged(t, before, third.Namespace)

	first.del(t)
	wantSuccess(t, h.status(t, conf), "")
	second.del(t)
	h.wantUnchanged(t, empty, first.Namespace, second.Namespace, third.Namespace)
}

// TestAddAfterContainerVanished adds a container with the addresses and the host port of one that has vanished without
// DEL. What both share (non-masquerade CIDRs, source ranges, the program on loopback) is not removed with the dead one.
func TestAddAfterContainerVanished(t *testing.T) {
	h := newHost(t)
	conf := with(with(dual("1.1.0"), "runtimeConfig.portMappings", webPort), "runtimeConfig.ips", list{"10.88.0.9", "fd00:88::9"})
	conf = with(conf, "nonMasqueradeCIDRs", list{"172.16.0.0/12", "fd00:99::/64"})
	conf = with(conf, "args.cni.portSources", list{object{"hostPort": 8080, "sources": list{"192.0.2.0/24"}}})
	for name, forget := range map[string]func(t *testing.T){
		"addresses and port": func(t *testing.T) {
			t.Helper()
			testenv.Must(t, os.RemoveAll(filepath.Join(testenv.ReservationDir, "pods")))
		},
		"port": func(*testing.T) {},
	} {
		t.Run(name, func(t *testing.T) {
			dead, next := h.pod(t, "dead", conf), h.pod(t, "next", conf)
			before := h.snapshot(t, next.Namespace)
			dead.add(t)
			testenv.Must(t, dead.Netlink().LinkDel(dead.device(t)))
			if forget(t); name == "port" {
				next.conf = with(conf, "runtimeConfig.ips", list{"10.88.0.10", "fd00:88::10"})
			}
			call := next.try(t, "ADD")
			if !strings.Contains(string(call.Stderr), "a container that is gone") {
				t.Errorf("stderr of ADD: got %q, want it to name the container that is gone", call.Stderr)
			}
			call.Stderr = nil
			wantSuccess(t, call, anything)
			next.result, _ = decode(t, call.Stdout).(object)
			wantSuccess(t, next.try(t, "CHECK"), "")
			dead.del(t)
			wantSuccess(t, next.try(t, "CHECK"), "")
			next.del(t)
			h.wantUnchanged(t, before, next.Namespace)
		})
	}
}

// A device of the host that is not the container's disappears meanwhile. No verb must fail for it.

// TestUplinkGone has a new uplink disappear before its programs are attached: it is one of another namespace.
func TestUplinkGone(t *testing.T) {
	const name, index = "ghost", 77

	h := newLoadedHost(t)
	elsewhere := testenv.New(t, "elsewhere")
	ghost := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Index: index}, PeerName: "peer"}
	testenv.Must(t, elsewhere.Netlink().LinkAdd(ghost))
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		if _, err := refresh.Uplinks(testenv.Context(t), elsewhere.Netlink(), datapath, []string{name}, 0); err != nil {
			t.Errorf("reconcile with an uplink that is gone: %v", err)
		}
		uplinks, err := maps.Uplinks(datapath)
		if slices.ContainsFunc(uplinks, func(u maps.Uplink) bool { return u.IfIndex == index }) {
			t.Errorf("uplinks: got %v, want none with ifindex %d", uplinks, index)
		}
		return err
	})
}

// TestSysctlGone has a device disappear while ADD has the host keep the router advertisements there.
func TestSysctlGone(t *testing.T) {
	h := newLoadedHost(t)
	for nth := 1; nth <= 2; nth++ {
		t.Run(fmt.Sprint(nth), func(t *testing.T) {
			p := h.pod(t, "c1", dual("1.1.0"))
			trace := filepath.Join(t.TempDir(), "trace")
			h.wrapPlugin(t, fmt.Sprintf(`exec strace -f -qq -o %s -P /proc/sys/net/ipv6/conf/%s/accept_ra -e inject=openat:error=ENOENT:when=%d "$1"`,
				trace, testenv.UplinkName, nth))
			testenv.Eventually(t, "an error of the call", func() error { // strace counts the calls of each thread
				for name, value := range map[string]string{"all/forwarding": "0", testenv.UplinkName + "/accept_ra": "1"} {
					testenv.Must(t, h.Node.SetSysctl("net/ipv6/conf/"+name, value))
				}
				p.add(t)
				text := string(testenv.ReadFile(t, trace)) // before DEL, which writes it, too
				p.del(t)
				if !strings.Contains(text, "INJECTED") {
					return fmt.Errorf("got the calls %s", text)
				}
				return nil
			})
		})
	}
}
