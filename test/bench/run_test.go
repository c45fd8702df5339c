package main

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// onMachine runs a function on a Machine, as main does.
func onMachine(t *testing.T, fn func(*testenv.Machine) error) {
	t.Helper()
	m := &testenv.Machine{Name: "bench"}
	if err := m.Protect(func() error { return fn(m) }); err != nil {
		t.Error(err)
	}
	// Only the end of its process removes the datapaths of a run.
	if err := errors.Join(m.CleanUp(), os.RemoveAll(loader.Root)); err != nil {
		t.Error(err)
	}
}

var (
	someOfEach = scale{Pods: 20, Ports: 10, Flows: 100}
	slowLoad   = dimensions[3].at(100)
)

// smallRun measures a little of everything.
func smallRun(m *testenv.Machine, only selection) (*run, error) {
	if err := chooseCPUs(); err != nil {
		return nil, err
	}
	r := newRun(m, options{selection: only})
	r.plan = plan{rounds: 1, slice: 8 * time.Millisecond, calls: 1, scales: []scale{someOfEach, slowLoad, bothCPUs}, uplinked: []string{plainName}}
	r.progress.to = new(strings.Builder)
	if err := r.setUp(); err != nil {
		return nil, err
	}
	r.progress.start(r.steps())
	r.measure()
	r.inspect()
	r.collect()
	r.result.evaluate()
	return r, nil
}

func TestSmallRun(t *testing.T) {
	var r *result
	onMachine(t, func(m *testenv.Machine) error {
		run, err := smallRun(m, selection{variants: []string{bareName, redirectName, plainName, bridgeName, establishedName}})
		if err == nil {
			r = run.result
		}
		return err
	})
	if r == nil {
		return
	}
	measured := r.measured(t)
	for name, want := range map[string]int{
		bareName: 32, redirectName: 16, plainName: 48, bridgeName: 48, establishedName: 48,
		setupName(establishedName, "", someOfEach): 18, setupName(establishedName, "", slowLoad): 18, setupName(bareName, "", bothCPUs): 6,
		setupName(plainName, "big-uplink", smallest): 4, setupName(plainName, "frames", smallest): 4,
	} {
		if measured[name] != want {
			t.Errorf("%s: %d results of traffic, want %d", name, measured[name], want)
		}
	}
	for _, name := range []string{bareName, bridgeName, establishedName} {
		for _, verb := range verbs {
			if c := r.calls(name, verb); c.Error != "" || c.P50 <= 0 || c.P99 < c.P50 || len(c.Concurrent) != 1 || c.Concurrent[0] <= 0 {
				t.Errorf("%s of %s: %+v", verb, name, c)
			}
		}
	}
	ours, _ := r.setup(establishedName)
	if ours.Objects.bytes() == 0 {
		t.Errorf("memory: %+v", ours.Objects)
	}
	if text := r.tables(); strings.Contains(text, "NaN") || !strings.Contains(text, "Targets") {
		t.Errorf("tables:\n%s", text)
	}
}

// measured counts the results of each setup.
func (r *result) measured(t *testing.T) map[string]int {
	t.Helper()
	if len(r.NotInspected) > 0 {
		t.Errorf("not inspected: %q", r.NotInspected)
	}
	measured := make(map[string]int)
	for _, c := range r.Traffic {
		measured[c.Setup]++
		if c.Error != "" || len(c.Rates) != 1 || c.Rates[0] <= 0 {
			t.Errorf("%+v", c)
		}
	}
	return measured
}

// Between nodes, each way is measured, and is the one that carries the traffic.
func TestSmallRunBetweenNodes(t *testing.T) {
	testenv.Require(t, testenv.VXLAN)
	onMachine(t, func(m *testenv.Machine) error {
		run, err := smallRun(m, selection{
			variants:  []string{bareName, routesName, kindnetSlowName, flannelName, directName, tunnelName},
			paths:     []string{podNode},
			workloads: []string{"udp-packets", "tcp-crr", streamName},
		})
		if err != nil {
			return err
		}
		if measured := run.result.measured(t); len(measured) != 6 {
			t.Errorf("measured %v, absent %+v", measured, run.result.Setups)
		}
		for _, s := range run.setups {
			for _, device := range map[string][]string{flannelName: {"flannel.1", "flannel-v6.1"}, tunnelName: {tunnelDevice}}[s.variant.name] {
				link, err := s.topology.Node.Netlink().LinkByName(device)
				if err != nil {
					return err
				}
				const fewPackets = 100
				if sent := link.Attrs().Statistics.TxPackets; sent < fewPackets {
					t.Errorf("%s: %d packets by %s, want those of the benchmark", s.name(), sent, device)
				}
			}
		}
		return nil
	})
}

// A run fails unless the rules beside a variant see its connections.
func TestRulesSeeConnections(t *testing.T) {
	var only selection
	for _, rules := range rulesets {
		only.variants = append(only.variants, ruledName(establishedName, rules), ruledName(ptpName, rules))
	}
	only.workloads = []string{"tcp-rr"}
	onMachine(t, func(m *testenv.Machine) error {
		r, err := smallRun(m, only)
		if err != nil {
			return err
		}
		if len(r.setups) != len(only.variants) || len(r.result.measured(t)) != len(only.variants) {
			t.Errorf("%d setups, want %d", len(r.setups), len(only.variants))
		}
		if err := r.checkRules(); err != nil {
			t.Error(err)
		}
		for _, s := range r.setups {
			if err := errors.Join(restore(s.topology.Node, "flush ruleset", "nft", "-f", "-"), s.addRules()); err != nil {
				return err
			}
			if err := s.checkRules(); err == nil {
				t.Errorf("%s: no error, although no packet has passed the new rules", s.name())
			}
		}
		return nil
	})
}
