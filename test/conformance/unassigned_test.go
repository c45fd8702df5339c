package conformance

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// wantRefused compares the prefixes of the unreachable routes.
func (h *host) wantRefused(t *testing.T, when string, want ...string) {
	t.Helper()
	var got []string
	err := h.Node.Do(func() error {
		prefixes, err := rtnl.UnassignedPrefixes()
		for _, prefix := range prefixes {
			got = append(got, prefix.String())
		}
		return err
	})
	if slices.Sort(got); err != nil || !slices.Equal(got, want) {
		t.Errorf("%s: unreachable routes to %v (%v), want %v", when, got, err, want)
	}
}

// rangeOf returns the configuration of a network with a part of the subnet of dual.
func rangeOf(name, start, end string) object {
	conf := with(single("1.1.0"), "name", name)
	return with(conf, "ipam.ranges", list{list{object{"subnet": "10.88.0.0/16", "rangeStart": start, "rangeEnd": end}}})
}

// TestUnassignedRoutes follows the routes of networks that share a subnet.
func TestUnassignedRoutes(t *testing.T) {
	const ipv4, ipv6, part = "10.88.0.0/16", "fd00:88::/64", "10.88.1.64/26"

	h := newHost(t)
	other := rangeOf("other", "10.88.1.64", "10.88.1.127")
	first, second := h.pod(t, "c1", dual("1.1.0")), h.pod(t, "c2", other)
	h.wantRefused(t, "before ADD")
	first.add(t)
	h.wantRefused(t, "after the first ADD", ipv4, ipv6)
	h.pod(t, "c3", dual("1.1.0")).add(t)
	same := h.pod(t, "c4", with(with(single("1.1.0"), "name", "same"), "runtimeConfig.ips", list{"10.88.9.9"}))
	same.add(t)
	second.add(t)
	h.wantRefused(t, "with three networks", ipv4, ipv4, part, ipv6)
	for _, p := range []*pod{first, second, same} {
		p.del(t)
	}
	h.wantRefused(t, "after DEL", ipv4, ipv4, part, ipv6)
	for _, conf := range []object{dual("1.1.0"), with(single("1.1.0"), "name", "same")} {
		h.gc(t, withKey(conf, currentKey, attachments("c3")))
	}
	h.wantRefused(t, "after GC with a container in each list", ipv4, ipv4, part, ipv6)
	h.gc(t, withKey(with(single("1.1.0"), "name", "same"), currentKey, list{}))
	h.gc(t, dual("1.1.0")) // without a list: c3 is alive
	h.wantRefused(t, "after GC of the third network", ipv4, part, ipv6)
	h.gc(t, withKey(dual("1.1.0"), currentKey, list{}))
	h.wantRefused(t, "after GC of the first network", part)

	h.run(t, "ip route del unreachable "+part)
	h.wantRefused(t, "after another tool has removed the last one")
	first.add(t)
	second.add(t)
	h.wantRefused(t, "after ADD, which restores them", ipv4, part, ipv6)
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	h.wantRefused(t, "after unload")
}

// TestNoUnassignedRoutes has networks whose subnets are others' business: another IPAM plugin's, a cluster's node agent's,
// and that of a link of which the network has a part.
func TestNoUnassignedRoutes(t *testing.T) {
	h := newHost(t)
	state := filepath.Join(t.TempDir(), "node.json")
	h.writeState(t, state, `{"node": "a", "synced": "2026-01-02T03:04:05Z"}`)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni7"}}
	testenv.Must(t, h.Node.Netlink().LinkAdd(bridge))
	address, err := netlink.ParseAddr("10.88.0.1/16")
	if err == nil {
		err = h.Node.Netlink().AddrAdd(bridge, address)
	}
	if err == nil {
		err = h.Node.Netlink().LinkSetUp(bridge)
	}
	testenv.Must(t, err)
	for name, conf := range map[string]object{
		"without addresses":  with(single("1.1.0"), "ipam", absent),
		"in a cluster":       with(single("1.1.0"), "cluster", state),
		"a part of a bridge": rangeOf("pods", "10.88.1.64", "10.88.1.127"),
	} {
		p := h.pod(t, "c1", with(conf, "logFile", filepath.Join(t.TempDir(), "log"))) // it warns of the bridge
		p.add(t)
		h.wantRefused(t, name)
		p.del(t)
	}
	h.path, _ = installIPAMScript(t, "scripted", `[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.88.0.9/24"}]}'`)
	p := h.pod(t, "c2", with(single("1.1.0"), "ipam", object{"type": "scripted"}))
	p.add(t)
	h.wantRefused(t, "another IPAM plugin")
	h.pod(t, "c3", with(dual("1.1.0"), "logFile", filepath.Join(t.TempDir(), "log"))).add(t) // the bridge's route has another metric
	h.wantRefused(t, "all of a bridge", "10.88.0.0/16", "fd00:88::/64")
}
