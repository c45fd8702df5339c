package main

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/maps"
)

// dropping is a datapath in which a pod has one more denied packet each time.
type dropping struct {
	policyTarget
	packets atomic.Uint64
}

func (d *dropping) Denials() (map[policies.Denier]uint64, error) {
	packets := d.packets.Add(1)
	runtime.Gosched()
	return map[policies.Denier]uint64{{Pod: maps.PodToken("web")}: packets}, nil
}

// series returns the series of denied packets.
func (f *figures) series(t *testing.T) (list []string) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(f)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, metric := range family.Metric {
			if counter := metric.Counter; counter != nil {
				list = append(list, fmt.Sprintf("%s/%s %v", metric.Label[1].GetValue(), metric.Label[2].GetValue(), counter.GetValue()))
			}
		}
	}
	slices.Sort(list)
	return list
}

// TestFigures counts each packet once, and has series of present policies alone.
func TestFigures(t *testing.T) {
	cluster := policies.Cluster{Namespaces: map[string]labels.Set{"shop": {}}, Pods: []*policies.Pod{policies.PodOf(podObject("web", "this", 1, "web"))}}
	clusterWide := &api.ClusterNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: api.ClusterNetworkPolicySpec{
		Tier: api.AdminTier, Subject: api.ClusterNetworkPolicySubject{Namespaces: &metav1.LabelSelector{}},
		Ingress: []api.ClusterNetworkPolicyIngressRule{{Action: api.ClusterNetworkPolicyRuleActionDeny, From: []api.ClusterNetworkPolicyIngressPeer{{Namespaces: &metav1.LabelSelector{}}}}},
	}}
	host, compiler := &dropping{}, &policies.Compiler{Node: "this"}
	f := newFigures(host)
	f.count()
	for i := range 100 {
		cluster.Policies, cluster.ClusterPolicies = []*networkingv1.NetworkPolicy{policyObject(fmt.Sprint("p", i))}, []*api.ClusterNetworkPolicy{clusterWide}
		f.set(policies.Difference(compiler.Compile(cluster), &policies.Present{}, true).Want)
		f.count()
	}
	var counting sync.WaitGroup
	for range 100 {
		counting.Go(f.count)
	}
	counting.Wait()
	if got := fmt.Sprint(f.series(t)); got != "[/all 201 shop/p99 102]" {
		t.Errorf("got %s, want all 201 packets at the one policy, and those since the other one's start", got)
	}
}
