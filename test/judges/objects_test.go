package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/mattfenwick/cyclonus/pkg/matcher"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"

	compiler "github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/maps"
)

var namespaceLabels = map[string]labels.Set{"x": {"ns": "x", "team": "one"}, "y": {"ns": "y", "team": "two"}, "z": {"ns": "z"}}

// pods are some on each of two nodes. Ports of one name differ.
func randomPods(r *rand.Rand) (pods []*compiler.Pod) {
	for i := range 8 {
		pod := &compiler.Pod{
			Namespace: oneOf(r, "x", "y", "z"), Name: fmt.Sprint("p", i), Node: oneOf(r, "this", "this", "other"), Created: time.Unix(int64(i), 0),
			Labels:    labels.Set{"app": oneOf(r, "a", "b", "c"), oneOf(r, "tier", "role"): oneOf(r, "front", "back")},
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(r.IntN(2)), byte(i)}), netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i)})},
		}
		pod.UID = pod.Namespace + "/" + pod.Name
		for _, name := range []string{"http", "dns"} {
			if r.IntN(3) > 0 {
				port := compiler.NamedPort{Name: name, Protocol: oneOf(r, maps.TCP, maps.UDP), Port: oneOf[uint16](r, 53, 80, 81)}
				if len(pod.Ports) == 0 || pod.Ports[0].Port != port.Port { // cyclonus knows one name of a port
					pod.Ports = append(pod.Ports, port)
				}
			}
		}
		pods = append(pods, pod)
	}
	return pods
}

func oneOf[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

func some[T any](r *rand.Rand, most int, make func() T) (values []T) {
	for range r.IntN(most + 1) {
		values = append(values, make())
	}
	return values
}

func randomSelector(r *rand.Rand, keys map[string][]string) *metav1.LabelSelector {
	selector := &metav1.LabelSelector{}
	for key, values := range keys {
		switch r.IntN(6) {
		case 0:
			selector.MatchLabels = map[string]string{key: oneOf(r, values...)}
		case 1:
			operator := oneOf(r, metav1.LabelSelectorOpIn, metav1.LabelSelectorOpNotIn, metav1.LabelSelectorOpExists, metav1.LabelSelectorOpDoesNotExist)
			requirement := metav1.LabelSelectorRequirement{Key: key, Operator: operator}
			if operator == metav1.LabelSelectorOpIn || operator == metav1.LabelSelectorOpNotIn {
				requirement.Values = append([]string{oneOf(r, values...)}, some(r, 1, func() string { return oneOf(r, values...) })...)
			}
			selector.MatchExpressions = append(selector.MatchExpressions, requirement)
		}
	}
	return selector
}

func randomPodSelector(r *rand.Rand) *metav1.LabelSelector {
	return randomSelector(r, map[string][]string{"app": {"a", "b", "c"}, "tier": {"front", "back"}})
}

func randomPeer(r *rand.Rand) (peer networkingv1.NetworkPolicyPeer) {
	if r.IntN(4) == 0 {
		cidr := oneOf(r, "0.0.0.0/0", "10.0.0.0/8", "10.0.0.0/24", "10.0.0.4/30", "::/0", "fd00::/124")
		excepts := map[string][]string{
			"0.0.0.0/0": {"10.0.0.0/24", "192.0.2.0/24"}, "10.0.0.0/8": {"10.0.1.0/24", "10.0.0.0/30"}, "10.0.0.0/24": {"10.0.0.2/31"},
			"10.0.0.4/30": {"10.0.0.5/32"}, "::/0": {"fd00::/126"}, "fd00::/124": {"fd00::1/128"},
		}
		peer.IPBlock = &networkingv1.IPBlock{CIDR: cidr, Except: some(r, 2, func() string { return oneOf(r, excepts[cidr]...) })}
		return peer
	}
	if r.IntN(3) > 0 {
		peer.PodSelector = randomPodSelector(r)
	}
	if peer.PodSelector == nil || r.IntN(2) == 0 {
		peer.NamespaceSelector = randomSelector(r, map[string][]string{"ns": {"x", "y", "z"}, "team": {"one", "two"}})
	}
	return peer
}

func randomPort(r *rand.Rand) (port networkingv1.NetworkPolicyPort) {
	protocol := oneOf(r, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
	port.Protocol = &protocol
	switch r.IntN(4) {
	case 0:
	case 1:
		port.Port = new(intstr.FromString(oneOf(r, "http", "dns", "nobody")))
	case 2:
		port.Port, port.EndPort = new(intstr.FromInt32(79)), new(oneOf[int32](r, 79, 80, 81))
	default:
		port.Port = new(intstr.FromInt32(oneOf[int32](r, 53, 80, 81)))
	}
	return port
}

func randomObject(r *rand.Rand, n int) *networkingv1.NetworkPolicy {
	object := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: oneOf(r, "x", "y", "z"), Name: fmt.Sprint("policy", n)}}
	spec := &object.Spec
	spec.PodSelector = *randomPodSelector(r)
	spec.PolicyTypes = oneOf(r, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}, []networkingv1.PolicyType{networkingv1.PolicyTypeEgress},
		[]networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress})
	peers := func() []networkingv1.NetworkPolicyPeer {
		return some(r, 3, func() networkingv1.NetworkPolicyPeer { return randomPeer(r) })
	}
	ports := func() []networkingv1.NetworkPolicyPort {
		return some(r, 2, func() networkingv1.NetworkPolicyPort { return randomPort(r) })
	}
	for _, kind := range spec.PolicyTypes {
		for range r.IntN(3) {
			if kind == networkingv1.PolicyTypeIngress {
				spec.Ingress = append(spec.Ingress, networkingv1.NetworkPolicyIngressRule{From: peers(), Ports: ports()})
			} else {
				spec.Egress = append(spec.Egress, networkingv1.NetworkPolicyEgressRule{To: peers(), Ports: ports()})
			}
		}
	}
	return object
}

// end is an address of a pod, or of a host outside.
type end struct {
	pod  *compiler.Pod
	addr netip.Addr
}

func (e end) podInfo() *api.PodInfo {
	if e.pod == nil {
		return nil
	}
	info := &api.PodInfo{Name: e.pod.Name, Labels: e.pod.Labels, Namespace: &api.Namespace{Name: e.pod.Namespace, Labels: namespaceLabels[e.pod.Namespace]}}
	for _, port := range e.pod.Ports {
		info.ContainerPorts = append(info.ContainerPorts, &api.ContainerPort{Name: port.Name, Port: int32(port.Port), Protocol: string(protocol(port.Protocol.String()))})
	}
	return info
}

func (e end) trafficPeer() *matcher.TrafficPeer {
	peer := &matcher.TrafficPeer{IP: e.addr.String()}
	if e.pod != nil {
		peer.Internal = &matcher.InternalPeer{PodLabels: e.pod.Labels, Namespace: e.pod.Namespace, NamespaceLabels: namespaceLabels[e.pod.Namespace]}
	}
	return peer
}

// TestObjects compares what the node agent compiles with the judges, for random policies, pods and connections. The compiler
// goes on, as an agent does.
func TestObjects(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("-seed %d", *seed)
	c, votes := &compiler.Compiler{Node: "this"}, map[bool]int{}
	for range *caseCount / 4 {
		pods := randomPods(r)
		objects := some(r, 4, func() *networkingv1.NetworkPolicy { return randomObject(r, r.IntN(1000)) })
		state := c.Compile(compiler.Cluster{Policies: objects, Namespaces: namespaceLabels, Pods: pods})
		for range 40 {
			family := r.IntN(2)
			pick := func() end {
				if r.IntN(8) == 0 {
					return end{nil, []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}[family]}
				}
				pod := oneOf(r, pods...)
				return end{pod, pod.Addresses[family]}
			}
			from, to := pick(), pick()
			if from.addr == to.addr {
				continue
			}
			proto, port := oneOf(r, maps.TCP, maps.UDP, maps.SCTP, maps.ICMP), oneOf[uint16](r, 53, 79, 80, 81)
			if proto == maps.ICMP {
				port = 0
			}
			for direction, kind := range []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress} {
				own, peer := to, from
				if kind == networkingv1.PolicyTypeEgress {
					own, peer = from, to
				}
				if own.pod == nil || own.pod.Node != "this" {
					continue
				}
				got := true
				if rules := state.Pods[own.pod.UID]; rules != nil {
					_, got = rules.Sets[direction].Verdict(maps.Peer{Addr: peer.addr, Class: state.Classes[peer.addr]}, uint8(proto), port)
				}
				want, err := judge(objects, kind, from, to, proto, port)
				if votes[want]++; err != nil || got != want {
					text, _ := json.Marshal(objects)
					t.Fatalf("%s of %v (%+v) to %v (%+v), %v %d: got %v, want %v (%v): %s", kind, from.addr, from.pod, to.addr, to.pod, proto, port, got, want, err, text)
				}
			}
		}
	}
	if share := float64(votes[true]) / float64(votes[true]+votes[false]); share < 0.2 || share > 0.9 {
		t.Errorf("%.2f of the connections are admitted: the cases are not balanced", share)
	}
}

// judge returns what both judges say.
func judge(objects []*networkingv1.NetworkPolicy, kind networkingv1.PolicyType, from, to end, proto maps.Protocol, port uint16) (bool, error) {
	const sourcePort = 40000
	own := to
	if kind == networkingv1.PolicyTypeEgress {
		own = from
	}
	var selecting []*networkingv1.NetworkPolicy
	for _, object := range objects {
		selector, err := metav1.LabelSelectorAsSelector(&object.Spec.PodSelector)
		if err != nil {
			return false, err
		}
		if object.Namespace == own.pod.Namespace && selector.Matches(own.pod.Labels) {
			selecting = append(selecting, object)
		}
	}
	name := protocol(proto.String())
	var first bool
	if kind == networkingv1.PolicyTypeEgress {
		first = networkpolicy.EvaluatePolicyDirection(context.Background(), selecting, kind, from.podInfo(), sourcePort, to.podInfo(), to.addr.AsSlice(), int(port), name)
	} else {
		first = networkpolicy.EvaluatePolicyDirection(context.Background(), selecting, kind, to.podInfo(), int(port), from.podInfo(), from.addr.AsSlice(), sourcePort, name)
	}
	traffic := &matcher.Traffic{Source: from.trafficPeer(), Destination: to.trafficPeer(), ResolvedPort: int(port), Protocol: name}
	if to.pod != nil {
		for _, named := range to.pod.Ports {
			if named.Port == port && named.Protocol == proto {
				traffic.ResolvedPortName = named.Name
			}
		}
	}
	result := matcher.BuildNetworkPolicies(true, objects).IsTrafficAllowed(traffic)
	second := result.Ingress.IsAllowed()
	if kind == networkingv1.PolicyTypeEgress {
		second = result.Egress.IsAllowed()
	}
	// cyclonus takes NotIn for false where the label is missing; Kubernetes' own selectors do not.
	if text, err := json.Marshal(objects); err != nil || first != second && !strings.Contains(string(text), string(metav1.LabelSelectorOpNotIn)) {
		return first, fmt.Errorf("kube-network-policies admits it: %v, cyclonus: %v", first, second)
	}
	return first, nil
}
