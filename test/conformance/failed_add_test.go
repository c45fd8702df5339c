package conformance

import (
	"strings"
	"testing"
)

// TestFailedAdd fails ADD before each of its steps, and in the last, which leaves
// all the others to undo.
func TestFailedAdd(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.state(t, p.Namespace)

	for _, step := range stepsOfAdd(t, p) {
		t.Run("before "+step, func(t *testing.T) { failAndRetry(t, p, before, role{FailBefore: step}) })
	}
	t.Run("in print the result", func(t *testing.T) { failAndRetry(t, p, before, role{FailPrint: true}) })
}

// stepsOfAdd learns the names by an ADD that succeeds.
func stepsOfAdd(t *testing.T, p *pod) []string {
	t.Helper()
	const fewest = 8 // or the steps are not what this test believes

	call, stopped := p.addAs(t, role{})
	if stopped || call.Exit != 0 {
		t.Fatalf("ADD: %+v", call)
	}
	p.del(t)
	steps := stepsOf(call)
	if len(steps) < fewest || !isDistinct(steps) {
		t.Fatalf("steps of ADD are %q", steps)
	}
	return steps
}

func failAndRetry(t *testing.T, p *pod, before state, r role) {
	t.Helper()
	call, stopped := p.addAs(t, r)
	if stopped {
		t.Fatal("ADD did not end")
	}
	if call.Exit == 0 || !strings.Contains(string(call.Stdout), errOnPurpose.Error()) {
		t.Errorf("ADD exited with %d and says %s, want %q", call.Exit, call.Stdout, errOnPurpose)
	}
	p.host.wantState(t, before, p.Namespace)
	p.add(t)
	p.del(t)
	p.host.wantState(t, before, p.Namespace)
}

// TestFailedInsideStep fails ADD by what it finds, in the middle of a step.
func TestFailedInsideStep(t *testing.T) {
	h := newHost(t)
	holder := h.pod(t, "holder", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	holder.add(t)

	ports := list{object{"hostPort": 7070, "containerPort": 80}, webPort[0]}
	overlapping := list{object{"dst": "10.0.0.0/8"}, object{"dst": "10.0.0.0/8"}}
	for name, conf := range map[string]object{
		"second port taken":              with(dual("1.0.0"), "runtimeConfig.portMappings", ports),
		"no second address":              with(dual("1.0.0"), "ipam.ranges", list{list{object{"subnet": "10.77.0.0/24"}}, list{object{"subnet": "fd00:77::/126", "rangeStart": "fd00:77::1", "rangeEnd": "fd00:77::1"}}}),
		"same route twice":               with(dual("1.0.0"), "ipam.routes", overlapping),
		"gateway that is not reachable":  with(dual("1.0.0"), "ipam.routes", list{object{"dst": "0.0.0.0/0", "gw": "203.0.113.7"}}),
		"resolvConf that does not exist": with(dual("1.0.0"), "ipam.resolvConf", "/run/absent"),
	} {
		t.Run(name, func(t *testing.T) {
			p := h.pod(t, "c1", conf)
			before := h.state(t, p.Namespace, holder.Namespace)
			if call := p.try(t, "ADD"); call.Exit == 0 {
				t.Errorf("ADD succeeded: %s", call.Stdout)
			}
			h.wantState(t, before, p.Namespace, holder.Namespace)
			p.conf = dual("1.0.0")
			p.add(t)
		})
	}
}
