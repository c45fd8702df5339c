package policies

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpfnet/ebpfnet/maps"
)

// hostile is a policy with a rule for each number, for the pods of namespace x.
func hostile(number int, make func(i int) networkingv1.NetworkPolicyIngressRule) []*networkingv1.NetworkPolicy {
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "hostile"}}
	for i := range number {
		policy.Spec.Ingress = append(policy.Spec.Ingress, make(i))
	}
	return []*networkingv1.NetworkPolicy{policy}
}

func fromBlock(cidr string, except ...string) networkingv1.NetworkPolicyIngressRule {
	return networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: cidr, Except: except}}}}
}

func fromPods(operator metav1.LabelSelectorOperator, i int) networkingv1.NetworkPolicyIngressRule {
	requirement := metav1.LabelSelectorRequirement{Key: longest("key", 0), Operator: operator, Values: []string{longest("value", i)}}
	return networkingv1.NetworkPolicyIngressRule{From: []networkingv1.NetworkPolicyPeer{{
		NamespaceSelector: &metav1.LabelSelector{}, PodSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{requirement}},
	}}}
}

// longest returns a label of the largest size.
func longest(word string, i int) string { return fmt.Sprintf("%s-%0*d", word, 62-len(word), i) }

// TestHostile has objects of a size or with a content that users should not have. What the pods of their namespace admit is
// known, also if it is nothing, and those of another one have what they had before.
func TestHostile(t *testing.T) {
	var crowd []*Pod
	for i := range 2000 {
		crowd = append(crowd, &Pod{
			UID: fmt.Sprint("crowd", i), Namespace: "z", Name: fmt.Sprint("crowd", i), Node: "other", Labels: labels.Set{longest("key", 0): longest("value", i)},
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})},
		})
	}
	ports := hostile(1, func(int) networkingv1.NetworkPolicyIngressRule { return networkingv1.NetworkPolicyIngressRule{} })
	for port := range 65000 {
		ports[0].Spec.Ingress[0].Ports = append(ports[0].Spec.Ingress[0].Ports, networkingv1.NetworkPolicyPort{Port: new(intstr.FromInt32(int32(port + 1)))})
	}
	oddPorts := hostile(1, func(int) networkingv1.NetworkPolicyIngressRule { return networkingv1.NetworkPolicyIngressRule{} })
	for port := 1; port < 65000; port += 2 {
		oddPorts[0].Spec.Ingress[0].Ports = append(oddPorts[0].Spec.Ingress[0].Ports, networkingv1.NetworkPolicyPort{Port: new(intstr.FromInt32(int32(port)))},
			networkingv1.NetworkPolicyPort{Port: new(intstr.FromString(fmt.Sprint("port", port)))})
	}
	var exceptions []string
	for i := range 100_000 {
		exceptions = append(exceptions, fmt.Sprintf("10.%d.%d.%d/32", 128+i>>16, i>>8&255, i&255))
	}
	names := hostile(1, func(int) networkingv1.NetworkPolicyIngressRule { return networkingv1.NetworkPolicyIngressRule{} })
	names[0].Name, names[0].Spec.PodSelector.MatchLabels = "a\nx/b", map[string]string{"app": "a"}
	for _, name := range []string{"a", "b"} {
		policy := hostile(0, nil)[0]
		policy.Name, policy.Spec.PodSelector.MatchLabels = name, map[string]string{"app": "web"}
		names = append(names, policy)
	}
	var small []*networkingv1.NetworkPolicy // the other namespace's policy is larger
	for i := range 200 {
		policy := hostile(25, func(j int) networkingv1.NetworkPolicyIngressRule { return fromPods("In", 25*i+j) })[0]
		policy.Name = fmt.Sprintf("h%03d", i)
		small = append(small, policy)
	}
	for name, test := range map[string]struct {
		policies []*networkingv1.NetworkPolicy
		admits   string
		warning  string
	}{
		"many rules": {hostile(10000, func(i int) networkingv1.NetworkPolicyIngressRule {
			return fromBlock(fmt.Sprintf("10.0.%d.%d/32", i>>8, i&255))
		}), "x/a:all|none x/b:all|none y/a:all|none z/c:all|none", ""},
		"too many ports":                {ports, "", "the policies of pod x/web have too many combinations of a peer and a port"},
		"many separate ports":           {oddPorts, "x/a:81,53 x/b:81,53 y/a:81,53 z/c:81,53 outside:81,53", ""},
		"too many exceptions":           {hostile(1, func(int) networkingv1.NetworkPolicyIngressRule { return fromBlock("10.0.0.0/8", exceptions...) }), "", "too many"},
		"many labels":                   {hostile(4000, func(i int) networkingv1.NetworkPolicyIngressRule { return fromPods("In", i) }), "crowd", ""},
		"too many labels":               {hostile(10000, func(i int) networkingv1.NetworkPolicyIngressRule { return fromPods("In", i) }), "", "over 4096 sets of pods"},
		"too many small policies":       {small, "crowd", "over 4096 sets of pods"},
		"too many combinations":         {hostile(4000, func(i int) networkingv1.NetworkPolicyIngressRule { return fromPods("NotIn", i) }), "", "too many combinations"},
		"exceptions of another family":  {hostile(1, func(int) networkingv1.NetworkPolicyIngressRule { return fromBlock("10.0.0.0/30", "fd00::/8") }), "x/a:all|none x/b:all|none", ""},
		"mapped prefixes":               {hostile(10000, func(int) networkingv1.NetworkPolicyIngressRule { return fromBlock("::ffff:10.0.0.0/104") }), "", "9996 more peers or ports are invalid"},
		"names with control characters": {names, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			pods := append(peersOf(), crowd...)
			pods[1].Namespace, pods[4].Namespace = "x", "z"
			other := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "o", Name: "other"}}
			other.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}}}
			for i := range 30 {
				other.Spec.Ingress = append(other.Spec.Ingress, fromPods("In", 20_000+i))
			}
			pods = append(pods, &Pod{UID: "o/other", Namespace: "o", Name: "other", Node: "this", Addresses: []netip.Addr{netip.MustParseAddr("10.2.0.1")}})
			cluster := clusterOf(t, pods)
			cluster.Policies = append(test.policies, other)
			c, before := &Compiler{Node: "this"}, heap()
			state := c.Compile(cluster)
			if grown := heap() - before; grown > 32<<20 {
				t.Errorf("the compiler keeps %d MiB", grown>>20)
			}
			runtime.KeepAlive(c)
			if got := admitted(state, ingress, peersOf()); got != test.admits && test.admits != "crowd" {
				t.Errorf("got %q, want %q", got, test.admits)
			}
			if _, ok := state.Pods["x/web"].Sets[ingress].Verdict(peerAt(state, crowd[17]), uint8(maps.TCP), 80); ok != (test.admits == "crowd") {
				t.Errorf("a pod of the crowd: got %t", ok)
			}
			if _, ok := state.Pods["o/other"].Sets[ingress].Verdict(peerAt(state, pods[3]), uint8(maps.TCP), 80); !ok {
				t.Error("the policies of another namespace admit another pod no longer")
			}
			if text := strings.Join(state.Warnings, "\n"); !strings.Contains(text, test.warning) || test.warning == "" && text != "" || len(text) > 4096 {
				t.Errorf("got warnings %.4096q, want one with %q", text, test.warning)
			}
		})
	}
}

// TestLimitEntries has pods whose rule sets do not fit into the maps together.
func TestLimitEntries(t *testing.T) {
	rules := func(entries int) *Rules { return &Rules{Sets: [2]*maps.RuleSet{{}, nil}, entries: entries} }
	half, own, state := rules(maxAllEntries/2), map[*Pod][]*parsed{}, &State{Pods: map[string]*Rules{}}
	for uid, r := range map[string]*Rules{"small": rules(1), "half": half, "same": half, "half too": rules(maxAllEntries / 2), "large": rules(maxAllEntries)} {
		own[&Pod{UID: uid, Name: uid}], state.Pods[uid] = nil, r
	}
	for i := range 9 { // smaller ones, of a namespace that has more of them
		uid := fmt.Sprint("crowd", i)
		own[&Pod{UID: uid, Name: uid, Namespace: "x"}], state.Pods[uid] = nil, rules(maxAllEntries/2-i-9)
	}
	limitEntries(own, state)
	for uid, want := range map[string]bool{"small": true, "half": true, "same": true, "half too": false, "large": false, "crowd0": false} {
		got := state.Pods[uid]
		if got.isFull == want || got.Sets[ingress] == nil || got.Sets[ingress].Host == want || got.Sets[egress] != nil {
			t.Errorf("%s: got %+v, want all its rules: %t", uid, got, want)
		}
	}
	if len(state.Warnings) != 10 {
		t.Errorf("got warnings %q, want one for each pod that is closed", state.Warnings)
	}
}

func peerAt(state *State, pod *Pod) maps.Peer {
	return maps.Peer{Addr: pod.Addresses[0], Class: state.Classes[pod.Addresses[0]]}
}

// heap returns how much memory is in use.
func heap() int64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}
