package main

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpfnet/ebpfnet/test/policies"
)

// objects returns the policies of a case as the API has them, by container: a network is a namespace, a container a
// pod in it.
func objects(c policies.Case) map[string][]*networkingv1.NetworkPolicy {
	byName := map[string][]*networkingv1.NetworkPolicy{}
	for _, connection := range c.Connections {
		for _, end := range []policies.End{connection.From, connection.To} {
			policy := c.Policies[end.Name] // of a host outside: none
			if spec := policySpec(end.Name, policy); len(spec.PolicyTypes) > 0 {
				meta := metav1.ObjectMeta{Name: end.Name, Namespace: end.Network}
				byName[end.Name] = []*networkingv1.NetworkPolicy{{ObjectMeta: meta, Spec: spec}}
			}
		}
	}
	return byName
}

func podLabels(name string) map[string]string        { return map[string]string{"container": name} }
func networkLabels(network string) map[string]string { return map[string]string{"network": network} }

func policySpec(container string, policy policies.Policy) networkingv1.NetworkPolicySpec {
	spec := networkingv1.NetworkPolicySpec{PodSelector: metav1.LabelSelector{MatchLabels: podLabels(container)}}
	if policy.Ingress != nil {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeIngress)
		spec.Ingress = make([]networkingv1.NetworkPolicyIngressRule, len(policy.Ingress))
	}
	if policy.Egress != nil {
		spec.PolicyTypes = append(spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		spec.Egress = make([]networkingv1.NetworkPolicyEgressRule, len(policy.Egress))
	}
	for i, rule := range policy.Ingress {
		spec.Ingress[i] = networkingv1.NetworkPolicyIngressRule{From: each(rule.From, peer), Ports: each(rule.Ports, port)}
	}
	for i, rule := range policy.Egress {
		spec.Egress[i] = networkingv1.NetworkPolicyEgressRule{To: each(rule.To, peer), Ports: each(rule.Ports, port)}
	}
	return spec
}

func peer(p policies.Peer) networkingv1.NetworkPolicyPeer {
	switch {
	case p.CIDR != "":
		return networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: p.CIDR, Except: p.Except}}
	case p.SameNetwork:
		return networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{}}
	default:
		return networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{MatchLabels: networkLabels(p.Network)}}
	}
}

func port(p policies.Port) networkingv1.NetworkPolicyPort {
	proto := protocol(cmp.Or(p.Protocol, "tcp"))
	entry := networkingv1.NetworkPolicyPort{Protocol: &proto}
	if p.Port != 0 {
		number := intstr.FromInt32(int32(p.Port))
		entry.Port = &number
	}
	if p.EndPort != 0 {
		last := int32(p.EndPort)
		entry.EndPort = &last
	}
	return entry
}

// protocol returns the API's word. It has none for ICMP, which no port of a rule matches.
func protocol(name string) corev1.Protocol {
	return map[string]corev1.Protocol{"tcp": corev1.ProtocolTCP, "udp": corev1.ProtocolUDP, "sctp": corev1.ProtocolSCTP}[name]
}

func each[A, B any](values []A, convert func(A) B) []B {
	var converted []B
	for _, value := range values {
		converted = append(converted, convert(value))
	}
	return converted
}
