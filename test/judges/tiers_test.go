package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/network"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
	npa "sigs.k8s.io/kube-network-policies/plugins/npa-v1alpha2"
	policyv1 "sigs.k8s.io/network-policy-api/apis/v1alpha2"
	policyfake "sigs.k8s.io/network-policy-api/pkg/client/clientset/versioned/fake"
	policyinformers "sigs.k8s.io/network-policy-api/pkg/client/informers/externalversions"

	compiler "github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
)

// tiers is a random cluster with one pod on this node, and policies of all tiers.
type tiers struct {
	*rand.Rand
	cluster compiler.Cluster
	pods    map[string]*api.PodInfo // by address; nil: no pod
	nodes   []*corev1.Node
}

func pick[T any](r *tiers, values ...T) T { return values[r.IntN(len(values))] }

func several[T any](r *tiers, most int, make func() T) (all []T) {
	for range 1 + r.IntN(most) {
		all = append(all, make())
	}
	return all
}

func (r *tiers) selector() metav1.LabelSelector {
	return pick(r, metav1.LabelSelector{}, metav1.LabelSelector{MatchLabels: map[string]string{"l": pick(r, "0", "1")}},
		metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "l", Operator: metav1.LabelSelectorOpNotIn, Values: []string{pick(r, "0", "1")}}}})
}

func (r *tiers) network() string {
	return pick(r, "0.0.0.0/0", "::/0", "10.0.0.0/8", "10.0.0.0/30", "10.0.1.0/24", "10.0.1.2/32", "192.0.2.0/24", "192.0.2.7/32", "fd00::/64", "fd00::1:2/127", "2001:db8::/32")
}

func (r *tiers) peer() (peer policyv1.ClusterNetworkPolicyEgressPeer) {
	switch namespaces := r.selector(); r.IntN(6) {
	case 0, 1:
		peer.Namespaces = &namespaces
	case 2, 3:
		peer.Pods = &policyv1.NamespacedPod{NamespaceSelector: namespaces, PodSelector: r.selector()}
	case 4:
		peer.Nodes = &namespaces
	default:
		peer.Networks = several(r, 3, func() policyv1.CIDR { return policyv1.CIDR(r.network()) })
	}
	return peer
}

func (r *tiers) protocol() policyv1.ClusterNetworkPolicyProtocol {
	port := pick(r, nil, &policyv1.Port{Number: pick[int32](r, 80, 81)}, &policyv1.Port{Range: &policyv1.PortRange{Start: pick[int32](r, 1, 80, 81), End: pick[int32](r, 82, 443, 65535)}})
	return pick(r, policyv1.ClusterNetworkPolicyProtocol{TCP: &policyv1.ClusterNetworkPolicyProtocolTCP{DestinationPort: port}},
		policyv1.ClusterNetworkPolicyProtocol{UDP: &policyv1.ClusterNetworkPolicyProtocolUDP{DestinationPort: port}},
		policyv1.ClusterNetworkPolicyProtocol{SCTP: &policyv1.ClusterNetworkPolicyProtocolSCTP{DestinationPort: port}},
		policyv1.ClusterNetworkPolicyProtocol{DestinationNamedPort: "http"})
}

func (r *tiers) protocols() []policyv1.ClusterNetworkPolicyProtocol {
	if r.IntN(3) == 0 {
		return nil
	}
	return several(r, 3, r.protocol)
}

func (r *tiers) action() policyv1.ClusterNetworkPolicyRuleAction {
	return pick(r, policyv1.ClusterNetworkPolicyRuleActionAccept, policyv1.ClusterNetworkPolicyRuleActionDeny, policyv1.ClusterNetworkPolicyRuleActionPass)
}

func (r *tiers) clusterPolicy(name string) *policyv1.ClusterNetworkPolicy {
	object := &policyv1.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}}
	namespaces := r.selector()
	object.Spec = policyv1.ClusterNetworkPolicySpec{Tier: pick(r, policyv1.AdminTier, policyv1.BaselineTier), Priority: r.Int32N(3)}
	object.Spec.Subject = pick(r, policyv1.ClusterNetworkPolicySubject{Namespaces: &namespaces},
		policyv1.ClusterNetworkPolicySubject{Pods: &policyv1.NamespacedPod{NamespaceSelector: namespaces, PodSelector: r.selector()}})
	object.Spec.Ingress = several(r, 4, func() policyv1.ClusterNetworkPolicyIngressRule {
		return policyv1.ClusterNetworkPolicyIngressRule{Action: r.action(), Protocols: r.protocols(), From: several(r, 2, func() policyv1.ClusterNetworkPolicyIngressPeer {
			for {
				if peer := r.peer(); peer.Namespaces != nil || peer.Pods != nil {
					return policyv1.ClusterNetworkPolicyIngressPeer{Namespaces: peer.Namespaces, Pods: peer.Pods}
				}
			}
		})}
	})
	object.Spec.Egress = several(r, 4, func() policyv1.ClusterNetworkPolicyEgressRule {
		return policyv1.ClusterNetworkPolicyEgressRule{Action: r.action(), Protocols: r.protocols(), To: several(r, 2, r.peer)}
	})
	return object
}

func (r *tiers) policy(name string) *networkingv1.NetworkPolicy {
	peers := func() (all []networkingv1.NetworkPolicyPeer) {
		if r.IntN(4) == 0 {
			return nil
		}
		return several(r, 2, func() networkingv1.NetworkPolicyPeer {
			pods, namespaces := r.selector(), r.selector()
			return pick(r, networkingv1.NetworkPolicyPeer{PodSelector: &pods}, networkingv1.NetworkPolicyPeer{NamespaceSelector: &namespaces, PodSelector: &pods},
				networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: r.network()}},
				networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8", Except: []string{"10.0.1.0/24"}}})
		})
	}
	ports := func() (all []networkingv1.NetworkPolicyPort) {
		if r.IntN(3) == 0 {
			return nil
		}
		return several(r, 2, func() networkingv1.NetworkPolicyPort {
			port := pick(r, intstr.FromInt32(80), intstr.FromInt32(81), intstr.FromString("http"))
			return networkingv1.NetworkPolicyPort{Protocol: new(pick(r, corev1.ProtocolTCP, corev1.ProtocolUDP)), Port: &port}
		})
	}
	object := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "n0", Name: name}}
	object.Spec.PolicyTypes = pick(r, []networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Egress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	object.Spec.PodSelector = r.selector()
	object.Spec.Ingress = several(r, 2, func() networkingv1.NetworkPolicyIngressRule {
		return networkingv1.NetworkPolicyIngressRule{From: peers(), Ports: ports()}
	})
	object.Spec.Egress = several(r, 2, func() networkingv1.NetworkPolicyEgressRule {
		return networkingv1.NetworkPolicyEgressRule{To: peers(), Ports: ports()}
	})
	return object
}

// newTiers returns a random cluster: four pods in two namespaces, two nodes, and addresses of neither.
func newTiers(seed uint64) *tiers {
	r := &tiers{Rand: rand.New(rand.NewPCG(seed, 1)), pods: map[string]*api.PodInfo{"192.0.2.7": nil, "198.51.100.1": nil, "2001:db8::7": nil, "2001:db8:1::1": nil}}
	r.cluster.Namespaces = map[string]labels.Set{"n0": {"l": "0"}, "n1": {"l": "1"}}
	for i := range 4 {
		namespace, label, node := fmt.Sprint("n", i%2), fmt.Sprint(i/2), map[bool]string{true: "this", false: "other"}[i == 0]
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint("p", i), UID: types.UID(fmt.Sprint("p", i)), Labels: map[string]string{"l": label}}}
		pod.Spec.NodeName = node
		container := corev1.Container{Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: int32(80 + i%2), Protocol: pick(r, corev1.ProtocolTCP, corev1.ProtocolUDP)}}}
		pod.Spec.Containers = []corev1.Container{container}
		info := &api.PodInfo{Name: pod.Name, Labels: pod.Labels, Namespace: &api.Namespace{Name: namespace, Labels: r.cluster.Namespaces[namespace]}}
		for _, port := range container.Ports {
			info.ContainerPorts = append(info.ContainerPorts, &api.ContainerPort{Name: port.Name, Port: port.ContainerPort, Protocol: string(port.Protocol)})
		}
		for _, addr := range []string{fmt.Sprintf("10.0.%d.%d", i%2, i+1), fmt.Sprintf("fd00::1:%d", i+1)} {
			pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: addr})
			r.pods[addr] = info
		}
		r.cluster.Pods = append(r.cluster.Pods, compiler.PodOf(pod))
	}
	for i, addrs := range [][]string{{"192.0.2.1", "2001:db8::1"}, {"198.51.100.7", "2001:db8:1::7"}} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("node", i), Labels: map[string]string{"l": fmt.Sprint(i)}}}
		for _, addr := range addrs {
			node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr})
			r.pods[addr] = nil
		}
		r.nodes, r.cluster.Nodes = append(r.nodes, node), append(r.cluster.Nodes, compiler.NodeOf(node))
	}
	for i := range 1 + r.IntN(4) {
		r.cluster.ClusterPolicies = append(r.cluster.ClusterPolicies, r.clusterPolicy(fmt.Sprint("c", i)))
	}
	for i := range r.IntN(3) {
		r.cluster.Policies = append(r.cluster.Policies, r.policy(fmt.Sprint("n", i)))
	}
	return r
}

// evaluators are kube-network-policies' ones of a tier each.
func (r *tiers) evaluators(t *testing.T) (admin, baseline api.PolicyEvaluator) {
	t.Helper()
	nodes, objects := informers.NewSharedInformerFactory(fake.NewSimpleClientset(), 0), policyinformers.NewSharedInformerFactory(policyfake.NewSimpleClientset(), 0)
	nodeInformer, policyInformer := nodes.Core().V1().Nodes(), objects.Policy().V1alpha2().ClusterNetworkPolicies()
	for _, node := range r.nodes {
		if err := nodeInformer.Informer().GetStore().Add(node); err != nil {
			t.Fatal(err)
		}
	}
	for _, object := range r.cluster.ClusterPolicies {
		if err := policyInformer.Informer().GetStore().Add(object); err != nil {
			t.Fatal(err)
		}
	}
	return npa.NewClusterNetworkPolicy(policyv1.AdminTier, policyInformer, nil, nodeInformer.Lister()),
		npa.NewClusterNetworkPolicy(policyv1.BaselineTier, policyInformer, nil, nodeInformer.Lister())
}

// TestTiers compares what the node agent compiles with kube-network-policies, for random policies of all tiers.
func TestTiers(t *testing.T) {
	votes := map[string]int{}
	for seed := range uint64(3000) {
		r := newTiers(seed)
		admin, baseline := r.evaluators(t)
		state, own := (&compiler.Compiler{Node: "this"}).Compile(r.cluster), r.cluster.Pods[0]
		later := r.cluster
		later.Pods = later.Pods[:3]
		agent := &compiler.Compiler{Node: "this"}
		before, young := agent.Compile(later), r.cluster.Pods[3]
		classes, isAll := agent.Update([]compiler.Event{{Now: young}})
		for text, peer := range r.pods {
			for _, port := range []int{80, 81, 82, 500} {
				for protocol, number := range protocolNumbers {
					for direction := range 2 {
						addr := netip.MustParseAddr(text)
						self := own.Addresses[map[bool]int{true: 0, false: 1}[addr.Is4()]]
						if addr == self {
							continue
						}
						_, got := state.Pods[own.UID].Sets[direction].Verdict(ebpfmaps.Peer{Addr: addr, Class: state.Classes[addr]}, number, uint16(port))
						want := r.verdict(t, direction == 1, admin, baseline, r.pods[self.String()], self, peer, addr, port, protocol)
						isYoung := slices.Contains(young.Addresses, addr)
						class := before.Classes[addr]
						for range 2 { // before the agent knows the last pod, and then
							_, admits := before.Pods[own.UID].Sets[direction].Verdict(ebpfmaps.Peer{Addr: addr, Class: class}, number, uint16(port))
							if admits && !want || !admits && want && (!isYoung || class != 0) {
								t.Fatalf("seed %d: %s, %s %d, direction %d, with a pod missing: got %t", seed, addr, protocol, port, direction, admits)
							}
							if !isYoung || !isAll || classes[addr] == 0 {
								break
							}
							class = classes[addr]
						}
						votes[fmt.Sprint(direction, want)]++
						if got != want {
							t.Fatalf("seed %d: %s, %s %d, direction %d: got %t, want %t", seed, addr, protocol, port, direction, got, want)
						}
					}
				}
			}
		}
	}
	if t.Log(votes); len(votes) != 4 {
		t.Errorf("got %v, want both verdicts in both directions", votes)
	}
}

// verdict asks the tiers in order.
func (r *tiers) verdict(t *testing.T, isEgress bool, admin, baseline api.PolicyEvaluator, own *api.PodInfo, self netip.Addr,
	peer *api.PodInfo, addr netip.Addr, port int, protocol corev1.Protocol) bool {
	t.Helper()
	ctx, packet := context.Background(), &network.Packet{SrcIP: net.IP(addr.AsSlice()), DstIP: net.IP(self.AsSlice()), SrcPort: 40000, DstPort: port, Proto: protocol}
	if isEgress {
		packet.SrcIP, packet.DstIP = packet.DstIP, packet.SrcIP
	}
	ask := func(tier api.PolicyEvaluator) api.Verdict {
		verdict, err := api.VerdictNext, error(nil)
		if isEgress {
			verdict, err = tier.EvaluateEgress(ctx, packet, own, peer)
		} else {
			verdict, err = tier.EvaluateIngress(ctx, packet, peer, own)
		}
		if err != nil {
			t.Fatal(err)
		}
		return verdict
	}
	if verdict := ask(admin); verdict != api.VerdictNext {
		return verdict == api.VerdictAccept
	}
	kind := networkingv1.PolicyTypeIngress
	if isEgress {
		kind = networkingv1.PolicyTypeEgress
	}
	var selecting []*networkingv1.NetworkPolicy
	isIsolated := false
	for _, object := range r.cluster.Policies {
		if networkpolicy.MatchesSelector(&object.Spec.PodSelector, own.Labels) {
			selecting = append(selecting, object)
			for _, of := range object.Spec.PolicyTypes {
				isIsolated = isIsolated || of == kind
			}
		}
	}
	if isIsolated && isEgress {
		return networkpolicy.EvaluatePolicyDirection(ctx, selecting, kind, own, 40000, peer, packet.DstIP, port, protocol)
	}
	if isIsolated {
		return networkpolicy.EvaluatePolicyDirection(ctx, selecting, kind, own, port, peer, packet.SrcIP, 40000, protocol)
	}
	return ask(baseline) != api.VerdictDeny
}
