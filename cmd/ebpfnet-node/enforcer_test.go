package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	gomaps "maps"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/apitest"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/objects"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// fakeDatapath applies all changes to what it has.
type fakeDatapath struct {
	mu      sync.Mutex
	present policies.Present
	refuse  error
	sizes   []string // of the changes
	denials uint64
	told    []*nodestate.Policies
	state   string
}

func (f *fakeDatapath) LookAtPolicies() (*policies.Present, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &policies.Present{Classes: gomaps.Clone(f.present.Classes)}, nil
}

func (f *fakeDatapath) ApplyPolicies(c *policies.Changes) (warning, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.refuse != nil {
		return nil, f.refuse
	}
	told, err := nodestate.ReadPolicies(f.state)
	f.present, f.told = *c.Want, append(f.told, told)
	f.present.Classes = gomaps.Clone(c.Want.Classes) // the enforcer changes its own
	f.sizes = append(f.sizes, fmt.Sprintf("%d+%d classes, %d policies, %d revoked", len(c.Additions), len(c.Others), len(c.Policies), len(c.Revoked)))
	return nil, err
}

// setRefusal has changes fail with an error, or be applied again.
func (f *fakeDatapath) setRefusal(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refuse = err
}

// lastTold returns what ADD had been told when the datapath last changed.
func (f *fakeDatapath) lastTold() *nodestate.Policies {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.told[len(f.told)-1]
}

// sizesSince returns the sizes of the changes but for the first ones.
func (f *fakeDatapath) sizesSince(first int) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.sizes[first:])
}

// Denials returns some of a pod's ingress, and one of a pod that is gone.
func (f *fakeDatapath) Denials() (map[policies.Denier]uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.denials += 3
	return map[policies.Denier]uint64{{Pod: maps.PodToken("web"), Attachment: 1}: f.denials, {Pod: 5, Attachment: 2}: 7}, nil
}

// enforcing is an enforcer that runs until the test ends.
type enforcing struct {
	*testing.T
	*enforcer
	api  *apitest.Server
	host *fakeDatapath

	mu     sync.Mutex
	output bytes.Buffer
	health error
}

func (e *enforcing) Write(text []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.output.Write(text)
}

func (e *enforcing) set(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.health = err
}

func startEnforcer(t *testing.T, api *apitest.Server) *enforcing {
	t.Helper()
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	source, err := objects.New(&rest.Config{Host: server.URL}, "this", &wait.Backoff{Duration: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(t.TempDir(), "node.json")
	e := &enforcing{T: t, api: api, host: &fakeDatapath{state: state}}
	e.enforcer = &enforcer{
		source: source, host: e.host, compiler: &policies.Compiler{Node: "this"}, state: state, grace: time.Hour,
		figures: newFigures(e.host), report: e.set, wake: func() {}, log: slog.New(slog.NewTextHandler(e, nil)),
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() {
		ended <- together(ctx, func(ctx context.Context) error { source.Run(ctx); return nil }, func(ctx context.Context) error { e.run(ctx); return nil })
	}()
	t.Cleanup(func() { stop(); <-ended })
	return e
}

func (e *enforcing) await(what string, holds func() string) {
	e.Helper()
	const patience = 20 * time.Second
	got := ""
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if got = holds(); got == "" {
			return
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Fatalf("%s: got %s; the log is %s; %v; watches %v", what, got, &e.output, e.health, e.api.Watched())
}

// admits waits until a pod of this node admits exactly these addresses.
func (e *enforcing) admits(what, pod string, addresses ...string) {
	e.Helper()
	e.await(what, func() string {
		e.host.mu.Lock()
		defer e.host.mu.Unlock()
		rules, got := e.host.present.Pods[maps.PodToken(pod)], []string{}
		if rules == nil {
			return "no entry"
		}
		for n := range 9 {
			addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
			if _, ok := rules.Sets[0].Verdict(maps.Peer{Addr: addr, Class: e.host.present.Classes[addr]}, uint8(maps.TCP), 80); ok {
				got = append(got, fmt.Sprint(n))
			}
		}
		if !slices.Equal(got, addresses) {
			return fmt.Sprintf("%v, want %v", got, addresses)
		}
		return ""
	})
}

func podObject(name, node string, address int, app string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), Labels: map[string]string{"app": app}}}
	pod.Spec.NodeName = node
	if address != 0 {
		pod.Status.PodIP = fmt.Sprintf("10.0.0.%d", address)
	}
	return pod
}

func policyObject(name string, from ...string) *networkingv1.NetworkPolicy {
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}
	policy.Spec.PodSelector.MatchLabels = map[string]string{"app": "web"}
	for _, app := range from {
		policy.Spec.Ingress = append(policy.Spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		}}})
	}
	return policy
}

// TestEnforcer follows objects from no policy to the last one, and watches no more than it needs.
func TestEnforcer(t *testing.T) {
	const policiesPath, namespacesPath = "/apis/networking.k8s.io/v1/networkpolicies", "/api/v1/namespaces"
	const own, others = "/api/v1/pods?spec.nodeName=this", "/api/v1/pods?spec.nodeName!=this"
	api := apitest.New()
	api.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, podObject("web", "this", 1, "web"), podObject("a", "other", 2, "a"))
	e := startEnforcer(t, api)
	watches := func(what string, want ...string) { t.Helper(); e.watches(what, want...) }
	e.isOpen("no policy", "shop", true)
	watches("no policy", policiesPath)

	api.Set(policyObject("closed"))
	e.admits("a policy without peers", "web")
	watches("a policy without peers", namespacesPath, own, policiesPath)
	if told := e.host.lastTold(); told.IsOpen("shop", time.Now()) {
		t.Error("ADD is told of the namespace after the datapath")
	}

	api.Set(policyObject("open", "a", "b"))
	e.admits("a policy with peers", "web", "2")
	watches("a policy with peers", namespacesPath, others, own, policiesPath)
	e.wantRules()
	api.Set(podObject("b", "other", 3, "b"))
	e.admits("a pod of another class", "web", "2", "3")

	e.wantFigures()
	before := len(e.host.sizesSince(0))
	api.Set(podObject("a2", "other", 4, "a"))
	e.admits("a pod of a known class", "web", "2", "3", "4")
	if got := strings.Join(e.host.sizesSince(before), "; "); got != "1+0 classes, 0 policies, 0 revoked" {
		t.Errorf("a pod of a known class: got %s, want one write", got)
	}
	before = len(e.host.sizesSince(0))
	api.Unset(podObject("a2", "", 0, ""))
	e.admits("a pod gone", "web", "2", "3")
	if got := strings.Join(e.host.sizesSince(before), "; "); got != "0+1 classes, 0 policies, 1 revoked" {
		t.Errorf("a pod gone: got %s, want one write, and one pod's connections judged again", got)
	}
	e.host.setRefusal(errors.New("operation not permitted"))

	api.Set(podObject("web2", "", 0, "web")) // not bound yet
	bound := podObject("web2", "this", 0, "web")
	api.Set(bound)
	e.await("a refusal", func() string {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.health == nil || !strings.Contains(e.health.Error(), "operation not permitted") {
			return fmt.Sprint(e.health)
		}
		return ""
	})
	e.host.setRefusal(nil)
	e.admits("a pod that is bound, and has no address yet", "web2", "2", "3")

	api.Unset(policyObject("open"))
	e.admits("no peers any more", "web2")
	watches("no peers any more", namespacesPath, own, policiesPath)
	api.Unset(policyObject("closed"))
	watches("no policy any more", policiesPath)
	e.await("no policy any more", func() string {
		e.host.mu.Lock()
		defer e.host.mu.Unlock()
		if told, _ := nodestate.ReadPolicies(e.state); len(e.host.present.Pods) > 0 || len(e.host.present.Classes) > 0 || !e.host.present.IsUnused || !told.IsOpen("shop", time.Now()) {
			return fmt.Sprintf("%+v, %+v", e.host.present, told)
		}
		return ""
	})
	if _, bad := api.Requests(); len(bad) > 0 {
		t.Errorf("requests: %v", bad)
	}
}

// TestFirstPolicy tells ADD of a namespace's first policy before the pods are listed.
func TestFirstPolicy(t *testing.T) {
	api := apitest.New()
	api.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, podObject("web", "this", 1, "web"), podObject("a", "other", 2, "a"))
	e := startEnforcer(t, api)
	e.isOpen("no policy", "shop", true)
	release := api.Stall("/api/v1/pods")
	api.Set(policyObject("open", "a"))
	e.isOpen("a policy", "shop", false)
	e.isOpen("a policy of another namespace", "other", true)
	release()
	e.admits("pods listed", "web", "2")
}

// isOpen waits until new pods of a namespace start without rules, or do not.
func (e *enforcing) isOpen(what, namespace string, want bool) {
	e.Helper()
	e.await(what, func() string {
		told, err := nodestate.ReadPolicies(e.state)
		if err != nil || told == nil || told.IsOpen(namespace, time.Now()) != want || !e.isReady.Load() {
			return fmt.Sprint(told, err)
		}
		return ""
	})
}

// refusing is the objects of an API server that refuses.
type refusing struct{ policySource }

func (refusing) Err() error { return errors.New("connection refused") }

// TestSilentServer renews the file for ADD only while the agent would hear of new policies, and says so.
func TestSilentServer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.json")
	e := &enforcer{source: refusing{}, state: path, grace: time.Hour}
	tell := func(namespaces ...string) (until time.Time) {
		err := e.tell(namespaces, false)
		told, errRead := nodestate.ReadPolicies(path)
		if err := errors.Join(err, errRead); err != nil {
			t.Fatal(err)
		}
		return told.Until
	}
	first := tell("shop")
	e.written = e.written.Add(-2 * interval)
	if second := tell("shop"); !second.Equal(first) || e.explain(nil) != nil {
		t.Errorf("after two minutes: got %v and %v, want %v", second, e.explain(nil), first)
	}
	e.written = e.written.Add(-nodestate.Silence)
	if err := e.explain(nil); !errors.Is(err, errSilent) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("after five minutes: got %v", err)
	}
	if third := tell("bar", "shop"); !third.After(first) {
		t.Errorf("another namespace: got %v, want it after %v", third, first)
	}
}

// watches waits until exactly these watches are under way, beside that of the CRD.
func (e *enforcing) watches(what string, want ...string) {
	e.Helper()
	want = slices.Sorted(slices.Values(append(want, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?metadata.name=clusternetworkpolicies.policy.networking.k8s.io")))
	e.await(what, func() string {
		if got := e.api.Watched(); !slices.Equal(got, want) {
			return fmt.Sprint(got)
		}
		return ""
	})
}

// TestClusterPolicies has the CRD installed, used, and removed while the agent runs.
func TestClusterPolicies(t *testing.T) {
	const others, own = "/api/v1/pods?spec.nodeName!=this", "/api/v1/pods?spec.nodeName=this"
	const policiesPath, clusterPath = "/apis/networking.k8s.io/v1/networkpolicies", "/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies"
	server := apitest.New()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: corev1.NodeSpec{PodCIDRs: []string{"10.0.0.0/29"}}}
	server.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, node, podObject("web", "this", 1, "web"), podObject("a", "other", 2, "a"), podObject("b", "other", 3, "b"))
	e := startEnforcer(t, server)
	isOpen := func(namespace string) bool {
		told, err := nodestate.ReadPolicies(e.state)
		return err == nil && told != nil && told.IsOpen(namespace, time.Now())
	}
	e.watches("no CRD", policiesPath)
	crd := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "clusternetworkpolicies.policy.networking.k8s.io"}}
	server.Set(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "others.policy.networking.k8s.io"}}, crd)
	e.watches("a CRD", policiesPath, clusterPath)
	e.await("no policy", func() string { return map[bool]string{false: "all pods wait"}[isOpen("later")] })

	pods := func(app string) api.ClusterNetworkPolicyIngressPeer {
		return api.ClusterNetworkPolicyIngressPeer{Pods: &api.NamespacedPod{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}}}
	}
	policy := &api.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "no-a"}, Spec: api.ClusterNetworkPolicySpec{
		Tier: api.AdminTier, Subject: api.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}},
		Ingress: []api.ClusterNetworkPolicyIngressRule{{Action: api.ClusterNetworkPolicyRuleActionDeny, From: []api.ClusterNetworkPolicyIngressPeer{pods("a")}}},
	}}
	server.Set(policy)
	// 1 is the gateway, which is no pod, and 0 to 7 are pods' addresses.
	e.admits("a denied class", "web", "1", "3", "8")
	e.watches("a policy", policiesPath, clusterPath, others, own, "/api/v1/namespaces", "/api/v1/nodes")
	if told := e.host.lastTold(); told.IsOpen("later", time.Now()) {
		t.Error("pods of namespaces that the agent does not know yet start without rules")
	}
	before := len(e.host.sizesSince(0))
	server.Set(podObject("b2", "other", 4, "b"))
	e.admits("a pod of a known class", "web", "1", "3", "4", "8")
	if got := strings.Join(e.host.sizesSince(before), "; "); got != "1+0 classes, 0 policies, 0 revoked" {
		t.Errorf("a pod of a known class: got %s, want one write", got)
	}
	e.await("the names of rules", func() string {
		rules, err := new(nodestate.RulesFile).Read(e.state)
		isolated, from := rules.Of(maps.PodToken("web").String(), false)
		if got := fmt.Sprint(isolated, from[:min(1, len(from))], err); got != "[no-a] [{no-a ingress[0] deny false [pods (app=a) of all namespaces] []}] <nil>" {
			return got
		}
		return ""
	})

	server.Unset(policy)
	e.watches("no policy any more", policiesPath, clusterPath)
	e.await("no policy any more", func() string { return map[bool]string{false: "all pods wait"}[isOpen("later") && isOpen("shop")] })
	server.Unset(crd)
	e.watches("no CRD any more", policiesPath)
	if _, bad := server.Requests(); len(bad) > 0 {
		t.Errorf("requests: %v", bad)
	}
}

// wantRules wants a pod's rules by their names.
func (e *enforcing) wantRules() {
	e.Helper()
	e.await("the names of rules", func() string {
		rules, err := new(nodestate.RulesFile).Read(e.state)
		isolated, from := rules.Of(maps.PodToken("web").String(), false)
		e.host.mu.Lock()
		defer e.host.mu.Unlock()
		classes := rules.Classes[e.host.present.Classes[netip.MustParseAddr("10.0.0.2")]]
		got := fmt.Sprint(isolated, from, classes, err)
		const want = "[shop/closed shop/open] " +
			"[{shop/open ingress[0]  false [pods (app=a) of namespace shop] []} {shop/open ingress[1]  false [pods (app=b) of namespace shop] []}] " +
			"[pods (app=a) of namespace shop] <nil>"
		if got != want {
			return got
		}
		return ""
	})
}

// wantFigures wants the metrics of two policies for two classes of pods.
func (e *enforcing) wantFigures() {
	e.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(e.figures)
	const want = `
# HELP ebpfnet_policy_classes Classes of pods that these rule sets tell apart.
# TYPE ebpfnet_policy_classes gauge
ebpfnet_policy_classes 2
# HELP ebpfnet_policy_denied_packets_total Packets that rules of pods have dropped since the agent's start, at each policy that isolates the pod.
# TYPE ebpfnet_policy_denied_packets_total counter
ebpfnet_policy_denied_packets_total{direction="ingress",namespace="shop",policy="closed"} 3
ebpfnet_policy_denied_packets_total{direction="ingress",namespace="shop",policy="open"} 3
# HELP ebpfnet_policy_rule_sets Rule sets that NetworkPolicies compile to for pods of this node.
# TYPE ebpfnet_policy_rule_sets gauge
ebpfnet_policy_rule_sets 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "ebpfnet_policy_classes", "ebpfnet_policy_denied_packets_total", "ebpfnet_policy_rule_sets"); err != nil {
		e.Error(err)
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		e.Errorf("got problems %v (%v), want none", problems, err)
	}
	families, err := registry.Gather()
	observed := map[string]uint64{}
	for _, family := range families {
		if histogram := family.Metric[0].Histogram; histogram != nil {
			observed[family.GetName()] = histogram.GetSampleCount()
		}
	}
	if err != nil || observed["ebpfnet_policy_compile_seconds"] == 0 || observed["ebpfnet_policy_event_to_kernel_seconds"] == 0 {
		e.Errorf("got %v (%v), want both histograms observed", observed, err)
	}
}
