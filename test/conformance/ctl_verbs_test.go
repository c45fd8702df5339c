package conformance

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// wantCtl runs ebpfnetctl, and wants an exit code, and words on stdout or, for a failure, on stderr.
func (h *host) wantCtl(t *testing.T, exit int, args []string, words ...string) {
	t.Helper()
	got, stdout, stderr := h.ctl(t, args...)
	text := stdout
	if exit != 0 {
		text = stderr
	}
	if got != exit {
		t.Errorf("ebpfnetctl %q: got exit code %d, want %d: %s%s", args, got, exit, stdout, stderr)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("ebpfnetctl %q: got %q, want it to contain %q", args, text, word)
		}
	}
}

// TestCtlRepair repairs a host that has lost all programs of a container.
func TestCtlRepair(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	h.wantCtl(t, 1, []string{"repair"}, "not loaded")
	p := h.pod(t, "c1", withPort(dual("1.1.0"), 8080))
	result := p.add(t)
	h.wantCtl(t, 0, []string{"repair"}, "nothing to repair")
	before := h.snapshot(t, p.Namespace)
	removeFilter(t, p, result)
	for _, pin := range []string{"uplink-*-to_uplink", "loopback-*"} {
		removePin(pin)(t, p, nil)
	}
	wantError(t, p.try(t, "CHECK"), cnierr.CodeDiffers, "programs", "loopback", testenv.UplinkName)
	h.wantCtl(t, 0, []string{"repair"}, "pods c1 eth0", "uplink "+testenv.UplinkName, "loopback")
	h.wantUnchanged(t, before, p.Namespace)
	h.wantCtl(t, 0, []string{"repair", "-o", "json"}, `"repaired": []`)
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantFetch(t, h, p.Namespace, result)
	p.del(t)
}

// TestCtlRepairReconciles repairs forwarding, and a new uplink.
func TestCtlRepairReconciles(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	h.disableForwarding(t)
	h.AddSecondUplink(t)
	h.wantCtl(t, 0, []string{"repair"}, "forwarding, by /proc/sys/net/ipv4/ip_forward\n", "forwarding, by /proc/sys/net/ipv6/conf/all/forwarding\n",
		"programs of the new uplink "+testenv.SecondUplinkName+"\n")
	h.wantCtl(t, 0, []string{"repair"}, "nothing to repair")
	wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6, testenv.SecondOutsideAddr4, testenv.SecondOutsideAddr6)
	p.del(t)
}

// TestCtlUnload wants unload to list first what it would break, and then to remove everything from the kernel. A
// later ADD loads the datapath again.
func TestCtlUnload(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", withPort(dual("1.1.0"), 8080))
	p.add(t)
	before := h.snapshot(t, p.Namespace)
	h.wantCtl(t, 1, []string{"unload"}, "nothing was done", "1 containers", "pods c1 eth0", testenv.UplinkName, "--yes")
	h.wantUnchanged(t, before, p.Namespace)

	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	h.wantCtl(t, 1, []string{"unload", "--yes"}, "not loaded")
	if pins, err := os.ReadDir(loader.Root); err != nil || len(pins) > 0 {
		t.Errorf("pins after unload: got %v (%v), want none", pins, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout)
	defer cancel()
	for _, where := range []string{"ingress", "egress"} {
		filters, err := h.Node.Run(ctx, "tc", "filter", "show", "dev", testenv.UplinkName, where)
		if err != nil || strings.Contains(filters, "uplink") {
			t.Errorf("filters after unload: got %s (%v), want none", filters, err)
		}
	}
	wantPing(t, p.Namespace, netip.MustParseAddr("10.88.0.1")) // the gateway
	h.wantCtl(t, 0, []string{"upgrade"}, "loaded: revision ")
	h.wantCtl(t, 0, []string{"load"}, "already loaded: revision ") // the alias
	p.del(t)
	result := p.add(t)
	wantFetch(t, h, p.Namespace, result)
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	p.del(t)
}

// TestCtlUnloadIfUnused wants unload --if-unused to refuse while a container is connected, loaded or not, and one of
// another dataDir, too.
func TestCtlUnloadIfUnused(t *testing.T) {
	h := newHost(t)
	ifUnused := []string{"unload", "--if-unused"}
	h.wantCtl(t, 0, ifUnused, "nothing is loaded")
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	h.wantCtl(t, 1, ifUnused, "stop the containers first", "pods c1 eth0")
	h.wantCtl(t, 0, []string{"status"})
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	h.wantCtl(t, 1, ifUnused, "pods c1 eth0")
	p.del(t)
	h.wantCtl(t, 0, ifUnused, "nothing is loaded")

	elsewhere := h.pod(t, "c2", with(dual("1.1.0"), "dataDir", "/run/elsewhere"))
	elsewhere.add(t)
	device, err := h.Node.Netlink().LinkByAlias("ebpfnet pods c2 eth0")
	if err == nil {
		err = h.Node.Netlink().LinkSetAlias(device, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	h.wantCtl(t, 1, ifUnused, "the one behind "+device.Attrs().Name)
	if err := h.Node.Netlink().LinkDel(device); err != nil {
		t.Fatal(err)
	}
	h.wantCtl(t, 0, ifUnused, "unloaded")
	h.wantCtl(t, 2, append(ifUnused, "--yes"))
	elsewhere.del(t)
}

// TestCtlSet changes settings of selected containers. CHECK expects the new ones until DEL.
func TestCtlSet(t *testing.T) {
	h := newHost(t)
	one, two := h.pod(t, "c1", dual("1.1.0")), h.pod(t, "c2", dual("1.1.0"))
	one.add(t)
	two.add(t)
	before := h.snapshot(t, one.Namespace, two.Namespace)
	h.wantCtl(t, 1, []string{"set", "pods/c3", "antiSpoof=false"}, "no such container", "pods/c3")
	h.wantCtl(t, 1, []string{"set", "others", "antiSpoof=false"}, "no such container")
	h.wantUnchanged(t, before, one.Namespace, two.Namespace)
	h.wantCtl(t, 0, []string{"set", "pods", "antiSpoof=false", "ingressPolicy=isolated"}, "pods c1 eth0", "pods c2 eth0", "isolated")
	h.wantCtl(t, 0, []string{"set", "pods/c1/eth0", "antiSpoof=true"}, "pods c1 eth0: antiSpoof=true")
	wantSuccess(t, one.try(t, "CHECK"), "")
	wantSuccess(t, two.try(t, "CHECK"), "")
	h.wantCtl(t, 0, []string{"set", "pods/c1", "antiSpoof=true", "ingressPolicy=open"}, "pods c1 eth0")
	one.del(t)
	one.add(t)
	wantSuccess(t, one.try(t, "CHECK"), "")
	one.del(t)
	two.del(t)
}
