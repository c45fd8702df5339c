package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestNetworkPolicy has policies come and go under pods that run, and pods start under policies: before, after and without
// their agent.
func TestNetworkPolicy(t *testing.T) {
	c := newCluster(t, append([]string{"--network-policy", "--log-denied=100"}, clusterCIDRs...)...)
	web, client, other := c.nodes[0], c.nodes[1], c.nodes[2]
	_, err := web.Run(testenv.Context(t), "nft", "table inet tracked { chain c { type filter hook prerouting priority 0; ct state new accept; }; }")
	testenv.Must(t, err)
	for _, name := range []string{"shop", "bar"} {
		c.api.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	c.putPod(web, web.pod, "web")
	c.putPod(client, client.pod, "client")
	c.putPod(other, other.pod, "other")

	web.wantState("syncedWithPolicies", "synced") // which older plugins look for, and find none

	// What its first policy would do, and then does.
	toWeb := testenv.Askers{c.startFlow(testenv.IPv4, client, web), c.startFlow(testenv.IPv6, client, web)}
	kept, admit := web.connect(testenv.IPv6, client), policyOf("client")
	testenv.NoError(t, toWeb.Lossless(t, func(attempt int) error {
		if attempt > 0 { // as before the first one
			c.api.Unset(admit)
			web.wantPolicies(0)
		}
		stopped := web.connect(testenv.IPv4, other)
		web.wantPreview("client", "", stopped.Local().String(), kept.Local().String())
		web.wantEnded(stopped, bpf.ReasonPolicyIngress, func() { c.api.Set(admit) })
		return nil
	}))
	toWeb.Stop()
	if _, err := kept.Ask(testenv.Context(t), "replies?"); err != nil {
		t.Errorf("a connection that the policy admits: %v", err)
	}
	for _, f := range testenv.Families {
		web.wantDenied(f, bpf.ReasonPolicyIngress, other.pod, web.pod)
		web.wantDenied(f, bpf.ReasonPolicyEgress, web.pod, client.pod)
		web.wantAdmitted(f, client.pod.Namespace, web.pod)
		web.wantAdmitted(f, web.Namespace, web.pod) // kubelet's probes
	}
	c.wantVisible(kept)

	// Pods that start under a policy, with and without the agent.
	second := c.addPolicedPod(web, "second", "shop")
	for _, f := range testenv.Families {
		web.wantDenied(f, bpf.ReasonPolicyIngress, other.pod, second)
		web.wantAdmitted(f, client.pod.Namespace, second)
	}
	web.agent.kill()
	free := c.addPolicedPod(web, "free", "bar")
	held := c.addPolicedPod(web, "held", "shop")
	for _, f := range testenv.Families {
		web.wantAdmitted(f, other.pod.Namespace, free)
		web.wantDenied(f, bpf.ReasonPolicyIngress, client.pod, held)
		web.wantAdmitted(f, client.pod.Namespace, second)
	}
	web.startAgent()
	eventually(t, "the agent to take over a pod that ADD has kept closed", func() error {
		return ask(t, client.pod.Namespace, testenv.IPv4, held)
	})
	web.wantDenied(testenv.IPv6, bpf.ReasonPolicyIngress, other.pod, held)

	// A peer gets other labels.
	running := web.connect(testenv.IPv6, client)
	web.wantEnded(running, bpf.ReasonPolicyIngress, func() { c.putPod(client, client.pod, "other") })
	web.wantDenied(testenv.IPv4, bpf.ReasonPolicyIngress, client.pod, second)
	c.putPod(other, other.pod, "client")
	eventually(t, "a peer to be admitted by its new label", func() error { return ask(t, other.pod.Namespace, testenv.IPv4, second) })

	c.wantAuditMode(second)
	c.wantTiers(second)

	// The end: of the policy, and of the option.
	c.api.Unset(admit)
	eventually(t, "the end of the policy", func() error { return ask(t, client.pod.Namespace, testenv.IPv6, web.pod) })
	web.wantPolicies(0)
	c.api.Set(admit)
	web.wantPolicies(3)
	web.agent.kill()
	web.options = clusterCIDRs
	web.startAgent()
	web.wantPolicies(0)
	web.wantState("synced", "syncedWithPolicies")
	web.wantAdmitted(testenv.IPv4, client.pod.Namespace, web.pod)
}

// policyOf isolates the pods of namespace shop but those of peers, in both directions: it admits peers.
func policyOf(app string) *networkingv1.NetworkPolicy {
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "admit"}}
	policy.Spec = networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: metav1.LabelSelectorOpIn, Values: []string{"web"}}}},
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
			PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		}}}},
	}
	return policy
}

// putPod writes the Pod object of a container.
func (c *cluster) putPod(n *node, pod *testenv.Pod, app string) {
	object := podObject(n, pod.Conf.ContainerID, "shop", app)
	object.Status.PodIPs = []corev1.PodIP{{IP: pod.Addr4().String()}, {IP: pod.Addr6().String()}}
	c.api.Set(object)
}

func podObject(n *node, name, namespace, app string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{NodeName: n.Name},
	}
}

// addPolicedPod binds a pod that the policy selects in namespace shop, and starts it.
func (c *cluster) addPolicedPod(n *node, name, namespace string) *testenv.Pod {
	c.Helper()
	c.api.Set(podObject(n, name, namespace, "web"))
	return n.runtime.AddPod(c, name, nil, [2]string{"IgnoreUnknown", "1"}, [2]string{"K8S_POD_NAMESPACE", namespace},
		[2]string{"K8S_POD_NAME", name}, [2]string{"K8S_POD_UID", "uid-" + name})
}

// patience is the time in which a packet that is not dropped has an answer.
const patience = time.Second

// ask asks a pod once.
func ask(tb testenv.TB, from *testenv.Namespace, f testenv.Family, to *testenv.Pod) error {
	tb.Helper()
	server := testenv.ServeTCP(tb, to.Namespace, netip.AddrPortFrom(f.Pod(to), 0))
	defer server.Close()
	ctx, stop := context.WithTimeout(testenv.Context(tb), patience)
	defer stop()
	_, err := testenv.Ask(ctx, from, "tcp", server.Addr, "hello")
	return err
}

func (n *node) wantAdmitted(f testenv.Family, from *testenv.Namespace, to *testenv.Pod) {
	n.t.Helper()
	server := testenv.ServeTCP(n.t, to.Namespace, netip.AddrPortFrom(f.Pod(to), 0))
	defer server.Close()
	if _, err := testenv.Ask(testenv.Context(n.t), from, "tcp", server.Addr, "hello"); err != nil {
		n.t.Errorf("%s asks %s by %s: %v", from.Name, to.Name, f.Name, err)
	}
}

// wantDenied wants no answer, and a drop for a reason on this node. On a busy machine the time for an answer may pass before the
// question arrives: then it is asked again.
func (n *node) wantDenied(f testenv.Family, reason bpf.Reason, from, to *testenv.Pod) {
	n.t.Helper()
	before := n.drops(reason)
	eventually(n.t, fmt.Sprintf("a drop for %v", maps.Reason(reason)), func() error {
		if err := ask(n.t, from.Namespace, f, to); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, context.DeadlineExceeded) {
			n.t.Fatalf("%s asks %s by %s: got %v, want no answer", from.Name, to.Name, f.Name, err)
		}
		if n.drops(reason) == before {
			return fmt.Errorf("%s asks %s by %s: got none", from.Name, to.Name, f.Name)
		}
		return nil
	})
}

// eventuallyDenied waits until there is no answer, but a drop for a reason on this node.
func (n *node) eventuallyDenied(what string, f testenv.Family, reason bpf.Reason, from, to *testenv.Pod) {
	n.t.Helper()
	eventually(n.t, what, func() error {
		before := n.drops(reason)
		err := ask(n.t, from.Namespace, f, to)
		if err == nil {
			return errors.New("got an answer")
		}
		if n.drops(reason) == before {
			return fmt.Errorf("no drop for %v: %w", maps.Reason(reason), err)
		}
		return nil
	})
}

// wantState waits for the agent's state to have a key, and not another one.
func (n *node) wantState(key, none string) {
	n.t.Helper()
	eventually(n.t, key+" in the state", func() error {
		text, err := os.ReadFile(n.state())
		state := map[string]any{}
		if err = errors.Join(err, json.Unmarshal(text, &state)); err == nil && (state[key] == nil || state[none] != nil) {
			err = fmt.Errorf("got %s, want no %s", text, none)
		}
		return err
	})
}

// connect connects another node's container to this one's.
func (n *node) connect(f testenv.Family, from *node) *testenv.Client {
	n.t.Helper()
	server := testenv.ServeTCP(n.t, n.pod.Namespace, netip.AddrPortFrom(f.Pod(n.pod), 0))
	client, err := testenv.NewClient(testenv.Context(n.t), from.pod.Namespace, "tcp", netip.AddrPort{}, server.Addr)
	testenv.Must(n.t, err)
	n.t.Cleanup(func() { client.Close(); server.Close() })
	_, err = client.Ask(testenv.Context(n.t), "hello")
	testenv.Must(n.t, err)
	return client
}

// wantEnded asks by a connection, from when the change is made, until there is no answer, but a drop for a reason on this node.
func (n *node) wantEnded(client *testenv.Client, reason bpf.Reason, change func()) {
	n.t.Helper()
	before := n.drops(reason)
	change()
	eventually(n.t, "a connection that is no longer admitted to end", func() error {
		ctx, stop := context.WithTimeout(testenv.Context(n.t), patience)
		defer stop()
		reply, err := client.Ask(ctx, "still there?")
		if err == nil {
			return fmt.Errorf("got %+v", reply)
		}
		if n.drops(reason) == before {
			return fmt.Errorf("no drop for %v: %w", maps.Reason(reason), err)
		}
		return nil
	})
}

func (n *node) withDatapath(use func(*loader.Datapath) error) {
	n.t.Helper()
	testenv.Must(n.t, n.WithDatapath(use))
}

// wantPolicies waits until the datapath has so many policies of pods.
func (n *node) wantPolicies(want int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("%d policies", want), func() (err error) {
		n.withDatapath(func(dp *loader.Datapath) error {
			all, errList := maps.Policies(dp)
			if len(all) != want {
				err = fmt.Errorf("got %+v", all)
			}
			return errList
		})
		return err
	})
}

// drops counts packets that this node has dropped for a reason.
func (n *node) drops(reason bpf.Reason) (packets uint64) {
	n.t.Helper()
	n.withDatapath(func(dp *loader.Datapath) error {
		all, err := maps.Drops(dp)
		for _, drop := range all {
			if drop.Reason == maps.Reason(reason) {
				packets += drop.Packets
			}
		}
		return err
	})
	return packets
}

// TestHostilePolicies has policies that no pod can have: the pods that they select admit nothing, and others what they had.
func TestHostilePolicies(t *testing.T) {
	most := int64(512 << 20) // bytes of an agent; on a busy machine, garbage is collected late
	if *long {
		most = 128 << 20
	}
	c := newCluster(t, append([]string{"--network-policy"}, clusterCIDRs...)...)
	web, client := c.nodes[0], c.nodes[1]
	for _, name := range []string{"shop", "bar"} {
		c.api.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	c.putPod(web, web.pod, "web")
	c.putPod(client, client.pod, "client")
	neighbor := policyOf("client")
	neighbor.Namespace, neighbor.Spec.Ingress[0].From[0].NamespaceSelector = "bar", &metav1.LabelSelector{}
	c.api.Set(neighbor)
	other := c.addPolicedPod(web, "other", "bar")
	web.wantAdmitted(testenv.IPv4, client.pod.Namespace, other)

	from := func(peer networkingv1.NetworkPolicyPeer) networkingv1.NetworkPolicyIngressRule {
		return networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{peer}}
	}
	for _, test := range []struct {
		rules int
		rule  func(i int) networkingv1.NetworkPolicyIngressRule
		log   string
	}{
		{65000, func(i int) networkingv1.NetworkPolicyIngressRule {
			return networkingv1.NetworkPolicyIngressRule{Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(int32(i + 1)))}}}
		}, "too many combinations of a peer and a port"},
		{10000, func(i int) networkingv1.NetworkPolicyIngressRule {
			return from(networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprintf("%063d", i)}}})
		}, "sets of pods by labels"},
		{10000, func(int) networkingv1.NetworkPolicyIngressRule {
			return from(networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "::ffff:0.0.0.0/96"}})
		}, "9996 more peers or ports are invalid"},
	} {
		policy := policyOf("client")
		policy.Name, policy.Spec.Ingress = "hostile\x1b[31m", nil
		for i := range test.rules {
			policy.Spec.Ingress = append(policy.Spec.Ingress, test.rule(i))
		}
		c.api.Set(policy)
		web.awaitLog(test.log)
		web.eventuallyDenied("the policy to close its pod", testenv.IPv6, bpf.ReasonPolicyIngress, client.pod, web.pod)
		for _, f := range testenv.Families {
			web.wantDenied(f, bpf.ReasonPolicyIngress, client.pod, web.pod)
			web.wantAdmitted(f, web.Namespace, web.pod)
			web.wantAdmitted(f, client.pod.Namespace, other)
		}
		c.api.Unset(policy)
		eventually(t, "the end of a policy", func() error { return ask(t, client.pod.Namespace, testenv.IPv6, web.pod) })
	}
	if got := web.agent.peak(t); got > most {
		t.Errorf("the agent had %d MiB, want at most %d", got>>20, most>>20)
	}
	if strings.Contains(web.agent.output.String(), "\x1b") {
		t.Error("the log has control characters of a policy's name")
	}
}
