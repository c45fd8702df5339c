package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestNodeAgent makes ADD and STATUS wait for a cluster's node agent, and says what that waits for. DEL does not wait.
func TestNodeAgent(t *testing.T) {
	h := newHost(t)
	state := filepath.Join(t.TempDir(), "node.json")
	conf := with(dual("1.1.0"), "cluster", state)
	p := h.pod(t, "c1", conf)
	before := h.snapshot(t, p.Namespace)
	for _, agent := range []struct{ state, why string }{
		{"", "is its pod of this node running?"}, // without a file
		{`{"node": "a", "error": "the API has no node a"}`, "the API has no node a"},
		{`{"node": "a"`, "unexpected end of JSON input"},
	} {
		if agent.state != "" {
			h.writeState(t, state, agent.state)
		}
		wantError(t, h.status(t, conf), codeNotAvailable, "the node agent has not synced since boot", agent.why)
		wantError(t, p.try(t, "ADD"), codeTryAgain, "the node agent has not synced since boot", agent.why)
		p.del(t)
		h.wantUnchanged(t, before, p.Namespace)
	}
	h.writeState(t, state, `{"node": "a", "syncedWithPolicies": "2026-01-02T03:04:05Z"}`)
	wantSuccess(t, h.status(t, conf), "")
	h.writeState(t, state, `{"node": "a", "synced": "2026-01-02T03:04:05Z", "error": "connection refused"}`)
	wantSuccess(t, h.status(t, conf), "")
	p.add(t)
	testenv.Must(t, os.Remove(state))
	p.del(t)
	h.wantUnchanged(t, before, p.Namespace)
	wantError(t, h.status(t, with(conf, "cluster", "node.json")), codeInvalidConfig, `cluster "node.json": expected the absolute path`)
}

func (h *host) writeState(t *testing.T, path, content string) {
	t.Helper()
	testenv.Must(t, os.WriteFile(path, []byte(content), 0o600))
}

// TestPodPolicy connects pods with and without NetworkPolicies, before and after the node agent has written theirs.
func TestPodPolicy(t *testing.T) {
	h := newHost(t)
	state := filepath.Join(t.TempDir(), "node.json")
	h.writeState(t, state, `{"node": "a", "syncedWithPolicies": "2026-01-02T03:04:05Z"}`)
	testenv.Must(t, nodestate.WritePolicies(state, nodestate.Policies{Namespaces: []string{"shop"}, Until: time.Now().Add(time.Hour)}))
	conf := with(with(dual("1.1.0"), "cluster", state), "ingressPolicy", "isolated")
	add := func(conf object, id, namespace, uid string) *pod {
		p := h.pod(t, id, conf)
		p.args = fmt.Sprintf("IgnoreUnknown=1;K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s;K8S_POD_UID=%s", namespace, id, uid)
		return p
	}
	unpoliced := add(conf, "unpoliced", "other", "u0")
	unpoliced.add(t)
	h.wantPolicy(t, unpoliced, maps.Policy{Ingress: 1})
	wantSuccess(t, unpoliced.try(t, "CHECK"), "")

	refused := add(with(conf, "policyUnknown", "fail"), "refused", "shop", "u1")
	before := h.snapshot(t, refused.Namespace)
	wantError(t, refused.try(t, "ADD"), codeTryAgain, "the node agent has not written the pod's NetworkPolicies")
	h.wantUnchanged(t, before, refused.Namespace)

	held := add(conf, "held", "shop", "u2")
	h.wantHeld(t, held)
	h.putPodPolicy(t, "u2", nil)
	h.wantPolicy(t, held, maps.Policy{IsPod: true})

	early := add(conf, "early", "shop", "u5")
	h.putPodPolicy(t, "u5", nil)
	early.add(t)
	h.wantPolicy(t, early, maps.Policy{IsPod: true})
	h.wantCtl(t, 1, []string{"set", "pods/early", "antiSpoof=false", "ingressPolicy=open"}, "only the node agent changes the rules of this pod")
	wantSuccess(t, early.try(t, "CHECK"), "") // nothing of it has been recorded

	late := add(conf, "late", "shop", "u3")
	waiting := make(chan *testenv.Call, 1)
	go func() { waiting <- late.try(t, "ADD") }()
	h.putPodPolicy(t, "u3", &maps.RuleSet{Host: true}) // before or while ADD waits
	wantSuccess(t, <-waiting, anything)
	h.wantPolicy(t, late, maps.Policy{IsPod: true, Ingress: 1})

	testenv.Must(t, nodestate.WritePolicies(state, nodestate.Policies{Until: time.Now().Add(-time.Second)}))
	wantError(t, h.status(t, conf), codeNotAvailable, "NetworkPolicies since 0001-01-01T00:00:00Z, and all new pods wait for theirs")
	stale := add(conf, "stale", "other", "u4")
	h.wantHeld(t, stale)
	h.writeState(t, state, `{"node": "a", "synced": "2026-01-02T03:04:05Z"}`) // of an older agent, which knows no policies
	older := add(conf, "older", "shop", "u6")
	h.wantHeld(t, older)
	testenv.Must(t, nodestate.WritePolicies(state, nodestate.Policies{Written: time.Now()})) // one that starts with the option
	wantSuccess(t, h.status(t, conf), "")
	starting := add(conf, "starting", "other", "u7")
	h.wantHeld(t, starting)

	for _, p := range []*pod{unpoliced, held, early, late, stale, older, starting} {
		p.del(t)
	}
	h.freePodPolicies(t, 6)
}

// wantHeld adds a pod, and wants that it can only talk to its node, and that the log says so.
func (h *host) wantHeld(t *testing.T, p *pod) {
	t.Helper()
	call := p.try(t, "ADD")
	if call.Exit != 0 || !strings.Contains(string(call.Stderr), "so it can only talk to its node") {
		t.Fatalf("ADD: got %v, stderr %q", call.Err(), call.Stderr)
	}
	h.wantPolicy(t, p, maps.Policy{IsPod: true, Ingress: 1, Egress: 1})
}

// wantPolicy wants a container to have a policy, whose references are 0 where those of want are.
func (h *host) wantPolicy(t *testing.T, p *pod, want maps.Policy) {
	t.Helper()
	h.withDatapath(t, func(dp *loader.Datapath) error {
		indexes, err := maps.DevicesOf(dp, maps.Attachment{Network: "pods", ContainerID: p.id, IfName: p.ifName}.Owner())
		if err != nil || len(indexes) != 1 {
			return fmt.Errorf("got devices %v: %w", indexes, err)
		}
		device, _, err := maps.GetDevice(dp, indexes[0])
		if err != nil {
			return err
		}
		_, uid, _ := strings.Cut(p.args, "K8S_POD_UID=")
		if !device.IsPod || device.Container != maps.Container(maps.PodToken(uid)) {
			t.Errorf("got device %+v, want the token of pod %s", device, uid)
		}
		got, err := maps.GetPolicy(dp, device.Policy)
		if got.IsPod != want.IsPod || (got.Ingress == 0) != (want.Ingress == 0) || (got.Egress == 0) != (want.Egress == 0) {
			t.Errorf("got policy %+v, want one like %+v", got, want)
		}
		return err
	})
}

// putPodPolicy writes what isolates a pod's ingress, as the node agent does.
func (h *host) putPodPolicy(t *testing.T, uid string, ingress *maps.RuleSet) {
	t.Helper()
	h.withDatapath(t, func(dp *loader.Datapath) error {
		return maps.With(testenv.Context(t), dp, func(store *maps.Store) error {
			_, err := store.PutPodPolicies([]maps.OwnPolicy{{Owner: maps.PodToken(uid), Ingress: ingress}})
			return err
		})
	})
}

// freePodPolicies wants that DELs have left the entries of pods, and that the node agent can free them.
func (h *host) freePodPolicies(t *testing.T, left int) {
	t.Helper()
	h.withDatapath(t, func(dp *loader.Datapath) error {
		all, err := maps.Policies(dp)
		if err != nil || len(all) != left {
			t.Errorf("got policies %+v (%v), want %d", all, err, left)
		}
		return maps.With(testenv.Context(t), dp, func(store *maps.Store) error {
			err := store.FreePodPolicies(nil)
			if all, errList := maps.Policies(dp); len(all) > 0 {
				err = errors.Join(err, errList, fmt.Errorf("policies %+v are left", all))
			}
			return err
		})
	})
}

// TestRemovalOfRulesBreaksOff wants that nobody shares what is left of a rule set.
func TestRemovalOfRulesBreaksOff(t *testing.T) {
	h := newHost(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	set := &maps.RuleSet{Rules: []maps.Rule{{Kind: maps.ClassPeer, Peer: 7, Last: 65535}}}
	h.putPodPolicy(t, "u1", set)
	h.withDatapath(t, func(dp *loader.Datapath) error {
		testenv.Must(t, errors.Join(dp.OpenOnDemand(bpf.MapPolicyBlocks), dp.PolicyBlocks.Close()))
		if maps.With(testenv.Context(t), dp, func(store *maps.Store) error { return store.FreePodPolicies(nil) }) == nil {
			t.Error("free: got no error without the map of blocks")
		}
		return nil
	})
	h.putPodPolicy(t, "u1", set)
	h.withDatapath(t, func(dp *loader.Datapath) error {
		all, err := maps.Policies(dp)
		testenv.Must(t, err)
		ingress, _, err := maps.NewRuleSets(dp).Of(all[0])
		if len(all) != 1 || ingress == nil || len(ingress.Rules) != 1 {
			t.Errorf("got policies %+v, the rules %+v (%v), want what was written", all, ingress, err)
		}
		return err
	})
}

// TestRulesWithoutRoom wants that a pod whose rules do not fit leaves nothing, and stops no other.
func TestRulesWithoutRoom(t *testing.T) {
	h := newHost(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	rules := func(class uint32) *maps.RuleSet {
		return &maps.RuleSet{Rules: []maps.Rule{{Kind: maps.ClassPeer, Peer: class, Last: 65535}}}
	}
	h.withDatapath(t, func(dp *loader.Datapath) error {
		want := func(what string, pods []maps.OwnPolicy, fitting loader.Owner, ruleSets int) {
			t.Helper()
			var indexes map[loader.Owner]maps.PolicyIndex
			err := maps.With(testenv.Context(t), dp, func(store *maps.Store) (err error) {
				indexes, err = store.PutPodPolicies(pods)
				return err
			})
			if !errors.Is(err, maps.ErrFull) || indexes[fitting] == 0 {
				t.Errorf("%s: got policies %v (%v), want one of pod %d", what, indexes, err, fitting)
			}
			counts, err := maps.Count(dp, bpf.MapRuleSets, bpf.MapPolicyRules)
			if err != nil || counts[bpf.MapRuleSets] != ruleSets || counts[bpf.MapPolicyRules] != ruleSets {
				t.Errorf("%s: got %v (%v), want %d rule sets of one rule", what, counts, err, ruleSets)
			}
		}
		testenv.Must(t, dp.OpenOnDemand(bpf.MapPolicies, bpf.MapRuleSets, bpf.MapPolicyRules))
		const unused = 1 << 24 // rule sets of a killed process
		for id := uint32(unused); dp.RuleSets.Put(id, &bpf.RuleSet{}) == nil; id++ {
		}
		testenv.Must(t, dp.RuleSets.Delete(uint32(unused)))
		want("one rule set fits", []maps.OwnPolicy{{Owner: 1, Ingress: rules(1), Egress: rules(2)}, {Owner: 2}}, 2, 0)

		crowd := []maps.OwnPolicy{}
		for i := range dp.Policies.MaxEntries() {
			crowd = append(crowd, maps.OwnPolicy{Owner: loader.Owner(i + 2)})
		}
		want("too many pods", crowd, 2, 0)
		want("no more pods", []maps.OwnPolicy{{Owner: 1, Ingress: rules(1)}, {Owner: 2, Ingress: rules(2)}}, 2, 1)
		return nil
	})
}
