package conformance

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A device of the host that is not the container's disappears meanwhile. No verb must fail for it.

// TestUplinkGone has a new uplink disappear before its programs are attached: it is one of another namespace.
func TestUplinkGone(t *testing.T) {
	const name, index = "ghost", 77

	h := newLoadedHost(t)
	elsewhere := testenv.New(t, "elsewhere")
	ghost := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, Index: index}, PeerName: "peer"}
	if err := elsewhere.Netlink().LinkAdd(ghost); err != nil {
		t.Fatal(err)
	}
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
			for hasFailed := false; !hasFailed; p.del(t) { // strace counts the calls of each thread
				for name, value := range map[string]string{"all/forwarding": "0", testenv.UplinkName + "/accept_ra": "1"} {
					if err := h.Node.SetSysctl("net/ipv6/conf/"+name, value); err != nil {
						t.Fatal(err)
					}
				}
				p.add(t)
				hasFailed = strings.Contains(string(readFile(t, trace)), "INJECTED")
			}
		})
	}
}
