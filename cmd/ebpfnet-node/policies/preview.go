package policies

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	networkingv1 "k8s.io/api/networking/v1"

	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// Preview says which connections a change would turn: deletions, and objects that are added or replace others.
func Preview(node string, cluster Cluster, deleted []string, objects []*networkingv1.NetworkPolicy, connections []nodestate.Connection) (nodestate.Previewed, error) {
	before := (&Compiler{Node: node}).Compile(cluster)
	present := map[string]*networkingv1.NetworkPolicy{}
	for _, o := range cluster.Policies {
		present[o.Namespace+"/"+o.Name] = o
	}
	for _, name := range deleted {
		if present[name] == nil {
			return nodestate.Previewed{}, fmt.Errorf("there is no NetworkPolicy %s to delete", name)
		}
		delete(present, name)
	}
	for _, o := range objects {
		present[o.Namespace+"/"+o.Name] = o
	}
	cluster.Policies = slices.Collect(maps.Values(present))
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
