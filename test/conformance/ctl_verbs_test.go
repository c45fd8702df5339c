package conformance

import (
	"context"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// wantCtl runs ebpfnetctl, and wants its exit code and words on stdout, or on stderr for an error.
func (h *host) wantCtl(t *testing.T, exit int, args []string, words ...string) {
	t.Helper()
	got, stdout, stderr := h.ctl(t, args...)
	text := stdout
	if exit != 0 {
		text = stderr
	}
	if got != exit {
		t.Errorf("ebpfnetctl %q exits with %d, want %d: %s%s", args, got, exit, stdout, stderr)
	}
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("ebpfnetctl %q says %q, without %q", args, text, word)
		}
	}
}

// TestCtlRepair takes all programs off that a container needs.
func TestCtlRepair(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	h.wantCtl(t, 1, []string{"repair"}, "not loaded")
	p := h.pod(t, "c1", withPort(dual("1.1.0"), 8080))
	result := p.add(t)
	h.wantCtl(t, 0, []string{"repair"}, "nothing was missing")
	before := h.state(t, p.Namespace)
	for _, pin := range []string{"endpoint-*-to_container", "uplink-*-to_uplink", "host-*"} {
		removePin(pin)(t, p, nil)
	}
	wantError(t, p.try(t, "CHECK"), plugin.CodeDiffers, "programs", "loopback", testenv.UplinkName)
	h.wantCtl(t, 0, []string{"repair"}, "pods c1 eth0", "uplink "+testenv.UplinkName, "loopback")
	h.wantState(t, before, p.Namespace)
	h.wantCtl(t, 0, []string{"repair", "-o", "json"}, `{"mended":[]}`)
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantFetch(t, h, p.Namespace, result)
	p.del(t)
}

// TestCtlUnload says first what it would break; then nothing is left in the kernel, and an ADD begins
// anew.
func TestCtlUnload(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", withPort(dual("1.1.0"), 8080))
	p.add(t)
	before := h.state(t, p.Namespace)
	h.wantCtl(t, 1, []string{"unload"}, "nothing was done", "1 containers", "pods c1 eth0", testenv.UplinkName, "--yes")
	h.wantState(t, before, p.Namespace)

	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	h.wantCtl(t, 1, []string{"unload", "--yes"}, "not loaded")
	if pins, err := os.ReadDir(loader.Root); err != nil || len(pins) > 0 {
		t.Errorf("%d pins are left: %v", len(pins), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout)
	defer cancel()
	for _, where := range []string{"ingress", "egress"} {
		filters, err := h.Node.Run(ctx, "tc", "filter", "show", "dev", testenv.UplinkName, where)
		if err != nil || strings.Contains(filters, "uplink") {
			t.Errorf("filters are left: %s (%v)", filters, err)
		}
	}
	wantPing(t, p.Namespace, netip.MustParseAddr("10.88.0.1")) // the host is still there
	h.wantCtl(t, 0, []string{"load"}, loader.Root)
	h.wantCtl(t, 0, []string{"load"}, loader.Root)
	p.del(t)
	result := p.add(t)
	wantFetch(t, h, p.Namespace, result)
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	p.del(t)
}
