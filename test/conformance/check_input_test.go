package conformance

import (
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

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
	if err := p.Netlink().AddrAdd(p.device(t), extra); err != nil {
		t.Fatal(err)
	}
	_, prefix, _ := net.ParseCIDR("198.18.0.0/15")
	if err := p.Netlink().RouteAdd(&netlink.Route{Dst: prefix, LinkIndex: p.device(t).Attrs().Index}); err != nil {
		t.Fatal(err)
	}
	wantSuccess(t, p.try(t, "CHECK"), "")

	unknown := h.pod(t, "c2", dual("1.0.0"))
	unknown.result = with(p.result, "cniVersion", "1.0.0")
	if call := unknown.try(t, "CHECK"); call.Exit == 0 {
		t.Error("CHECK of an unknown container: got success, want an error")
	} else if !strings.Contains(string(call.Stdout), "eth0") {
		t.Errorf("CHECK of an unknown container: got %s, want it to name eth0", call.Stdout)
	}
}
