package policies

import (
	"fmt"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// Change is objects that are added or replace others, and those that are deleted.
type Change struct {
	Policies        []*networkingv1.NetworkPolicy
	ClusterPolicies []*api.ClusterNetworkPolicy
	Deleted         []string // such as shop/web; without a namespace: a ClusterNetworkPolicy
}

// Preview says which connections a change would turn.
func Preview(node string, cluster Cluster, change Change, connections []nodestate.Connection) (nodestate.Previewed, error) {
	before := (&Compiler{Node: node}).Compile(cluster)
	for _, name := range change.Deleted {
		if !hasObject(cluster.Policies, name) && !hasObject(cluster.ClusterPolicies, name) {
			return nodestate.Previewed{}, fmt.Errorf("there is no policy %s to delete", name)
		}
	}
	cluster.Policies = replaced(cluster.Policies, change.Policies, change.Deleted)
	cluster.ClusterPolicies = replaced(cluster.ClusterPolicies, change.ClusterPolicies, change.Deleted)
	after := (&Compiler{Node: node}).Compile(cluster)
	previewed := nodestate.Previewed{Turns: []nodestate.Turn{}, Warnings: slices.DeleteFunc(after.Warnings, func(warning string) bool {
		return slices.Contains(before.Warnings, warning)
	})}
	for i, c := range connections {
		was, _ := before.judge(c)
		is, why := after.judge(c)
		if was != is {
			pod := after.Names[after.Own[c.Pod]]
			if pod == "" {
				pod = before.Names[before.Own[c.Pod]]
			}
			previewed.Turns = append(previewed.Turns, nodestate.Turn{Connection: i, Pod: pod, Admits: is, Why: why})
		}
	}
	return previewed, nil
}

func hasObject[T metav1.Object](all []T, name string) bool {
	return slices.ContainsFunc(all, func(o T) bool { return objectName(o) == name })
}

// objectName returns a name such as shop/web, or that of an object without a namespace.
func objectName(o metav1.Object) string {
	if o.GetNamespace() == "" {
		return o.GetName()
	}
	return o.GetNamespace() + "/" + o.GetName()
}

// replaced returns the objects without the deleted ones, and with added ones, of which the last of a name counts.
func replaced[T metav1.Object](present, added []T, deleted []string) []T {
	all := slices.DeleteFunc(slices.Clone(present), func(o T) bool { return slices.Contains(deleted, objectName(o)) })
	for _, o := range added {
		all = append(slices.DeleteFunc(all, func(other T) bool { return objectName(other) == objectName(o) }), o)
	}
	return all
}

// judge says whether the rules of a pod admit a connection, and why.
func (s *State) judge(c nodestate.Connection) (admits bool, why string) {
	rules := s.Pods[s.Own[c.Pod]]
	if rules == nil {
		return true, "not isolated"
	}
	direction := ingress
	if c.IsEgress {
		direction = egress
	}
	from := rules.Sources[direction]
	peer := ebpfmaps.Peer{Addr: c.Peer, Class: s.Classes[c.Peer], Self: s.Own[c.Peer] == s.Own[c.Pod]}
	admits, why = policy.Explain(rules.Sets[direction], func(number uint32) string { return from.rules[number-1].name },
		policy.Connection{Peer: peer, Protocol: ebpfmaps.Protocol(c.Protocol), Port: c.Port})
	if !admits {
		why = fmt.Sprintf("isolated by %s: %s", strings.Join(from.policies, ", "), why)
	}
	return admits || rules.Sets[direction].Audit, why
}
