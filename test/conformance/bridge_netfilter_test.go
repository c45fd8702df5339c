package conformance

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestBridgeNetfilter has br_netfilter on beside an uplink that is a bridge. CHECK and ebpfnetctl say so with the
// remedy, which silences them.
func TestBridgeNetfilter(t *testing.T) {
	testenv.Require(t, testenv.BridgeNetfilter)
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	name, name6 := testenv.BridgeNetfilterSysctls[0], testenv.BridgeNetfilterSysctls[1]
	set := func(name, value string) {
		t.Helper()
		if err := h.Node.SetSysctl(name, value); err != nil {
			t.Fatal(err)
		}
	}
	want := func(warned bool) {
		t.Helper()
		call := p.try(t, "CHECK")
		exit, out, _ := h.ctl(t, "status", "-o", "json")
		var status struct{ Warnings []string }
		if err := json.Unmarshal([]byte(out), &status); err != nil || exit != 0 || call.Exit != 0 {
			t.Fatalf("CHECK: exit code %d; ebpfnetctl status: %d (%v)", call.Exit, exit, err)
		}
		_, text, _ := h.ctl(t, "status")
		for from, said := range map[string]string{
			"CHECK": string(call.Stderr), "status": text, "status -o json": strings.Join(status.Warnings, "\n"),
		} {
			if got := strings.Contains(said, "uplink uplink1 is a bridge") && strings.Contains(said, "set net.bridge.bridge-nf-call-iptables to 0"); got != warned {
				t.Errorf("%s warns: %v, want %v: %s", from, got, warned, said)
			}
		}
	}
	set(name6, "0")
	set(name, "1")
	want(false) // no uplink is a bridge
	h.addUplink(t, "uplink1")
	want(true)
	withDatapath(t, h, func(d *loader.Datapath) error {
		uplinks, err := maps.Uplinks(d)
		bridges := 0
		for _, uplink := range uplinks {
			if uplink.Bridge {
				bridges++
			}
		}
		if len(uplinks) != 2 || bridges != 1 {
			t.Errorf("uplinks: got %+v, want one of two to be a bridge", uplinks)
		}
		return err
	})
	set(name, "0")
	want(false)
	p.del(t)
}
