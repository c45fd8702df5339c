package conformance

import (
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// rule adds or deletes a policy rule of the node.
func (h *host) rule(t *testing.T, verb, rule string) {
	t.Helper()
	words := strings.Fields(strings.Replace(rule, "rule", "rule "+verb, 1))
	if _, err := h.Node.Run(testenv.Context(t), "ip", words...); err != nil {
		t.Fatal(err)
	}
}

func (h *host) wantRules(t *testing.T, when string, want maps.RouteRules) {
	t.Helper()
	h.withDatapath(t, func(d *loader.Datapath) error {
		got, err := maps.ReadRouteRules(d)
		if got != want {
			t.Errorf("rules that the programs do not follow, %s: got %+v, want %+v", when, got, want)
		}
		return err
	})
}

// TestRouteRules adds and deletes policy rules. STATUS informs the programs of those that they cannot follow, and
// a change makes a new generation.
func TestRouteRules(t *testing.T) {
	h := newHost(t)
	conf := dual("1.1.0")
	p := h.pod(t, "c1", conf)
	p.add(t)
	v4, v6 := maps.RouteRules{IPv4: true}, maps.RouteRules{IPv6: true}
	for rule, want := range map[string]maps.RouteRules{
		"-4 rule from 10.88.0.0/24 lookup 100":        {},
		"-6 rule ipproto tcp lookup 100":              {},
		"-6 rule ipproto tcp dport 80 lookup 100":     v6,
		"-4 rule fwmark 0x64 lookup 100":              v4,
		"-6 rule fwmark 0x64/0xff lookup 100":         v6,
		"-4 rule not fwmark 0xca6c lookup 51820":      v4,
		"-4 rule tos 0x10 lookup 100":                 v4,
		"-6 rule tos 0x10 lookup 100":                 v6,
		"-4 rule lookup main suppress_prefixlength 0": {},
		"-6 rule lookup main suppress_prefixlength 0": v6,
		"-6 rule lookup main suppress_ifgroup 9":      v6,
	} {
		for _, step := range []struct {
			verb string
			want maps.RouteRules
		}{{"add", want}, {"del", maps.RouteRules{}}} {
			before := h.generation(t)
			h.rule(t, step.verb, rule)
			wantSuccess(t, h.status(t, conf), "")
			h.wantRules(t, step.verb+" "+rule, step.want)
			if changed := want != (maps.RouteRules{}); (h.generation(t) != before) != changed {
				t.Errorf("new generation after %s %s: want %v", step.verb, rule, changed)
			}
		}
	}
	p.del(t)
}

// TestRouteRulesOfAlways has such a rule before the first container. Each ADD that changes the uplinks looks for rules, and
// no other; ebpfnetctl says what follows from them, and repair follows a change.
func TestRouteRulesOfAlways(t *testing.T) {
	h := newHost(t)
	const rule = "-6 rule fwmark 0x64 lookup 100"
	v6 := maps.RouteRules{IPv6: true}
	h.rule(t, "add", rule)
	always := func(name string) *pod { return h.pod(t, name, with(dual("1.1.0"), "fastPath", "always")) }
	p, auto := h.pod(t, "c1", with(dual("1.1.0"), "fastPath", "established")), h.pod(t, "c2", dual("1.1.0"))
	wantStatus := func(want bool) {
		t.Helper()
		for _, args := range [][]string{{"status"}, {"status", "-o", "json"}} {
			_, out, _ := h.ctl(t, args...)
			if got := strings.Contains(out, "policy rules of the host for IPv6 "); got != want {
				t.Errorf("%q says that rules hinder fastPath always: %v, want %v: %s", args, got, want, out)
			}
		}
	}
	p.add(t)
	h.wantRules(t, "the first ADD", v6)
	h.wantCtl(t, 0, []string{"status"}, "established for IPv6 (", "policy rules)")
	wantStatus(false) // a warning is for always: auto is not meant to bypass all
	h.rule(t, "del", rule)
	auto.add(t)
	h.wantRules(t, "ADD with the same uplinks", v6)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	h.rule(t, "add", rule)
	always("c3").add(t)
	h.wantRules(t, "another ADD with the same uplinks", maps.RouteRules{})
	h.AddSecondUplink(t)
	always("c4").add(t)
	h.wantRules(t, "ADD with a new uplink", v6)
	wantStatus(true)
	h.rule(t, "del", rule)
	h.wantCtl(t, 0, []string{"repair"}, "policy rules")
	h.wantRules(t, "repair", maps.RouteRules{})
	wantStatus(false)
	h.wantCtl(t, 0, []string{"repair"}, "nothing to repair")
}
