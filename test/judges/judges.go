package main

import (
	"context"

	"github.com/mattfenwick/cyclonus/pkg/matcher"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"

	"github.com/ebpfnet/ebpfnet/test/policies"
)

func kubeNetworkPolicies(c policies.Case) []policies.Verdict {
	byContainer := objects(c)
	return each(c.Connections, func(conn policies.Connection) policies.Verdict {
		from, to, proto := podInfo(conn.From), podInfo(conn.To), protocol(conn.Protocol)
		ctx, sourcePort := context.Background(), 40000
		return policies.Verdict{
			Egress: networkpolicy.EvaluatePolicyDirection(ctx, byContainer[conn.From.Name], networkingv1.PolicyTypeEgress,
				from, sourcePort, to, conn.To.Addr.AsSlice(), int(conn.Port), proto),
			Ingress: networkpolicy.EvaluatePolicyDirection(ctx, byContainer[conn.To.Name], networkingv1.PolicyTypeIngress,
				to, int(conn.Port), from, conn.From.Addr.AsSlice(), sourcePort, proto),
		}
	})
}

// podInfo returns what identifies a container; nil for a host outside.
func podInfo(end policies.End) *api.PodInfo {
	if end.Network == "" {
		return nil
	}
	namespace := &api.Namespace{Name: end.Network, Labels: networkLabels(end.Network)}
	return &api.PodInfo{Name: end.Name, Labels: podLabels(end.Name), Namespace: namespace}
}

func cyclonus(c policies.Case) []policies.Verdict {
	var all []*networkingv1.NetworkPolicy
	for _, some := range objects(c) {
		all = append(all, some...)
	}
	policy := matcher.BuildNetworkPolicies(true, all)
	return each(c.Connections, func(conn policies.Connection) policies.Verdict {
		result := policy.IsTrafficAllowed(&matcher.Traffic{
			Source: trafficPeer(conn.From), Destination: trafficPeer(conn.To),
			ResolvedPort: int(conn.Port), Protocol: protocol(conn.Protocol),
		})
		return policies.Verdict{Egress: result.Egress.IsAllowed(), Ingress: result.Ingress.IsAllowed()}
	})
}

func trafficPeer(end policies.End) *matcher.TrafficPeer {
	peer := &matcher.TrafficPeer{IP: end.Addr.String()}
	if end.Network != "" {
		peer.Internal = &matcher.InternalPeer{
			PodLabels: podLabels(end.Name), Namespace: end.Network, NamespaceLabels: networkLabels(end.Network),
		}
	}
	return peer
}
