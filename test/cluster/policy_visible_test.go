package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// wantVisible wants the packets that policyOf("client") has denied the first node's pod, in metrics and in the log, and what
// another policy would turn: the client's connection ends, and the other's packets pass.
func (c *cluster) wantVisible(ends *testenv.Client) {
	c.Helper()
	web, client, other := c.nodes[0], c.nodes[1], c.nodes[2]
	eventually(c, "the denied packets in the metrics", func() error {
		_, body, err := web.get("/metrics")
		for _, direction := range []string{"ingress", "egress"} {
			const metric = `\nebpfnet_policy_denied_packets_total\{direction="%s",namespace="shop",policy="admit"\} [1-9]`
			want := regexp.MustCompile(fmt.Sprintf(metric, direction))
			if err == nil && !want.MatchString(body) {
				err = fmt.Errorf("want %v in %s", want, body)
			}
		}
		return err
	})
	for _, f := range testenv.Families {
		web.wantLine(f, other.pod, web.pod, drops.Drop{RuleSet: "ingress", Peer: f.Pod(other.pod).String(), Why: "shop/admit ingress[0] admits tcp"})
		web.wantLine(f, web.pod, client.pod, drops.Drop{RuleSet: "egress", Peer: f.Pod(client.pod).String(), Why: "there are no rules"})
	}
	admitted := web.wantPreview("other", web.agent.output.String(), ends.Local().String(), "")
	if !slices.ContainsFunc(admitted, func(source string) bool { return strings.HasPrefix(source, other.pod.Addr4().String()+":") }) {
		c.Errorf("preview: got the drops %v, want one of %v", admitted, other.pod.Addr4())
	}
	all := web.preview(web.agent.output.String(), 0, "--delete", "shop/admit")
	for _, want := range []turn{{"ingress", other.pod.Addr4().String(), "not isolated", true, true}, {"egress", web.pod.Addr4().String(), "not isolated", true, true}} {
		if !slices.ContainsFunc(all, func(got turn) bool {
			got.Source, _, _ = strings.Cut(got.Source, ":")
			return got == want
		}) {
			c.Errorf("preview of a deletion: got %+v, want %+v", all, want)
		}
	}
}

// wantAuditMode has packets pass that rules do not admit, until the namespace is no longer in audit mode.
func (c *cluster) wantAuditMode(pod *testenv.Pod) {
	c.Helper()
	web, client := c.nodes[0], c.nodes[1]
	shop := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{policies.ModeAnnotation: "audit"}}}
	c.api.Set(shop)
	for _, f := range testenv.Families {
		eventually(c, "audit mode", func() error { return ask(c, client.pod.Namespace, f, pod) })
	}
	if web.drops(bpf.ReasonPolicyAudit) == 0 {
		c.Error("audit mode reports nothing")
	}
	audited := web.connect(testenv.IPv4, client)
	shop.Annotations = nil
	web.wantEnded(audited, bpf.ReasonPolicyIngress, func() { c.api.Set(shop) })
	web.eventuallyDenied("the end of audit mode", testenv.IPv6, bpf.ReasonPolicyIngress, client.pod, pod)
}

// wantTiers has a ClusterNetworkPolicy deny what the policy admits, and accept what it does not, from when its definition is
// installed until it goes.
func (c *cluster) wantTiers(pod *testenv.Pod) {
	c.Helper()
	web, client, other := c.nodes[0], c.nodes[1], c.nodes[2] // their labels are web, other, client
	from := func(app string, action api.ClusterNetworkPolicyRuleAction) api.ClusterNetworkPolicyIngressRule {
		peer := api.NamespacedPod{PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}}
		return api.ClusterNetworkPolicyIngressRule{Action: action, From: []api.ClusterNetworkPolicyIngressPeer{{Pods: &peer}}}
	}
	tiers := &api.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "turned"}, Spec: api.ClusterNetworkPolicySpec{
		Tier: api.AdminTier, Subject: api.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}},
		Ingress: []api.ClusterNetworkPolicyIngressRule{
			from("client", api.ClusterNetworkPolicyRuleActionDeny), from("other", api.ClusterNetworkPolicyRuleActionAccept),
		},
	}}
	running := web.connect(testenv.IPv6, other)
	tiers.APIVersion, tiers.Kind = api.GroupVersion.String(), "ClusterNetworkPolicy"
	want := turn{"ingress", running.Local().String(), "isolated by turned, shop/admit: turned ingress[0] denies it", false, false}
	if turns := web.preview("", 3, "-f", web.fileOf(tiers)); !slices.Contains(turns, want) {
		c.Errorf("preview: got %+v, want %+v", turns, want)
	}
	web.wantEnded(running, bpf.ReasonPolicyIngress, func() {
		c.api.Set(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "clusternetworkpolicies.policy.networking.k8s.io"}}, tiers)
	})
	for _, f := range testenv.Families {
		web.wantDenied(f, bpf.ReasonPolicyIngress, other.pod, pod)
		web.wantAdmitted(f, client.pod.Namespace, pod)
		web.wantAdmitted(f, web.Namespace, pod) // kubelet's probes
	}
	eventually(c, "the line about the ClusterNetworkPolicy", func() error {
		if output := web.agent.output.String(); !strings.Contains(output, `"policies":["turned","shop/admit"],"why":"turned ingress[0] denies it"`) {
			return fmt.Errorf("got %s", output)
		}
		return nil
	})
	c.api.Unset(tiers)
	eventually(c, "the end of the ClusterNetworkPolicy", func() error { return ask(c, other.pod.Namespace, testenv.IPv4, pod) })
	web.wantDenied(testenv.IPv4, bpf.ReasonPolicyIngress, client.pod, pod)
}

// wantLine has one pod ask another until the agent prints its line about a connection that the policy denies the node's pod:
// the agent may not have followed drops yet when the first one was denied.
func (n *node) wantLine(f testenv.Family, from, to *testenv.Pod, want drops.Drop) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("the line about %s of %s", want.RuleSet, want.Peer), func() error {
		if ask(n.t, from.Namespace, f, to) == nil {
			n.t.Errorf("%s asks %s by %s: got an answer", from.Name, to.Name, f.Name)
		}
		output := n.agent.output.String()
		for line := range strings.Lines(output) {
			var got drops.Drop
			if json.Unmarshal([]byte(line), &got) == nil && got.Name == "shop/"+n.pod.Conf.ContainerID && got.RuleSet == want.RuleSet &&
				strings.Contains(got.Peer, want.Peer) && strings.HasPrefix(got.Why, want.Why) && slices.Equal(got.Policies, []string{"shop/admit"}) {
				return nil
			}
		}
		return fmt.Errorf("got %s", output)
	})
}

// wantPreview wants that a policy, if it replaced that of policyOf, would end the connection of one client, and not that of
// another one, if any. It returns the clients of dropped connections, in lines of drops, that it would admit.
func (n *node) wantPreview(app, lines, ends, stays string) (admitted []string) {
	n.t.Helper()
	policy := policyOf(app)
	policy.APIVersion, policy.Kind = "networking.k8s.io/v1", "NetworkPolicy"
	var ended []string
	for _, turn := range n.preview(lines, 3, "-f", n.fileOf(policy)) {
		if turn.Admits != turn.Drop || turn.Direction != "ingress" || !strings.Contains(turn.Why, "shop/admit") {
			n.t.Errorf("preview: got %+v", turn)
		}
		if turn.Drop {
			admitted = append(admitted, turn.Source)
		} else {
			ended = append(ended, turn.Source)
		}
	}
	if !slices.Contains(ended, ends) || slices.Contains(ended, stays) {
		n.t.Errorf("preview: got %v, want %v and not %v", ended, ends, stays)
	}
	return admitted
}

// fileOf writes an object as JSON.
func (n *node) fileOf(object any) string {
	n.t.Helper()
	file := filepath.Join(n.t.TempDir(), "object.json")
	text, err := json.Marshal(object)
	testenv.Must(n.t, errors.Join(err, os.WriteFile(file, text, 0o600)))
	return file
}

// turn is a connection that a change would turn.
type turn struct {
	Direction, Source, Why string
	Drop, Admits           bool
}

// preview asks what a change would turn, also of dropped connections, in lines of drops.
func (n *node) preview(lines string, exitCode int, change ...string) (turns []turn) {
	n.t.Helper()
	linesFile := filepath.Join(n.t.TempDir(), "drops")
	testenv.Must(n.t, os.WriteFile(linesFile, []byte(lines), 0o600))
	args := append([]string{"policy", "preview", "--drops", linesFile, "--state", n.state(), "-o", "json"}, change...)
	cmd := n.Command(testenv.Context(n.t), testenv.Build(n.t, "./cmd/ebpfnetctl"), args...)
	out, err := cmd.Output()
	if errJSON := json.Unmarshal(out, &turns); errJSON != nil || cmd.ProcessState.ExitCode() != exitCode {
		n.t.Fatalf("preview: got %s (%v, %v), want exit code %d", out, err, errJSON, exitCode)
	}
	return turns
}
