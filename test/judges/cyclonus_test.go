package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/mattfenwick/cyclonus/pkg/connectivity/probe"
	"github.com/mattfenwick/cyclonus/pkg/generator"
	"github.com/mattfenwick/cyclonus/pkg/matcher"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	compiler "github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
)

// cyclonusCluster is what the actions of cyclonus' cases change.
type cyclonusCluster struct {
	prefix   netip.Prefix // of pods
	all      *probe.Resources
	policies map[string]*networkingv1.NetworkPolicy
	compiler *compiler.Compiler // goes on, as an agent does
}

// reset returns to the state that each case begins with.
func (c *cyclonusCluster) reset() {
	c.all, c.policies = &probe.Resources{Namespaces: map[string]map[string]string{}}, map[string]*networkingv1.NetworkPolicy{}
	for _, namespace := range []string{"x", "y", "z"} {
		c.all.Namespaces[namespace] = map[string]string{"ns": namespace, corev1.LabelMetadataName: namespace}
		for _, name := range []string{"a", "b", "c"} {
			c.all.Pods = append(c.all.Pods, probe.NewDefaultPod(namespace, name, []int{80, 81}, []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}, false, ""))
		}
	}
	c.address()
}

// address gives pods that have none an address: those of namespace x are outside the networks that the cases name, and only
// the last ones are in the exceptions from these.
func (c *cyclonusCluster) address() {
	for i, pod := range c.all.Pods {
		bytes := c.prefix.Addr().AsSlice()
		bytes[len(bytes)-1] = byte(3 * (i + 1))
		if pod.Namespace == "x" {
			bytes[len(bytes)-2] = 1
		}
		// cyclonus' value for a pod without an address
		if addr, _ := netip.AddrFromSlice(bytes); pod.IP == "TODO" {
			pod.IP = addr.String()
		}
	}
}

func (c *cyclonusCluster) act(action *generator.Action) (err error) {
	switch {
	case action.CreatePolicy != nil:
		c.policies[action.CreatePolicy.Policy.Namespace+"/"+action.CreatePolicy.Policy.Name] = action.CreatePolicy.Policy
	case action.UpdatePolicy != nil:
		c.policies[action.UpdatePolicy.Policy.Namespace+"/"+action.UpdatePolicy.Policy.Name] = action.UpdatePolicy.Policy
	case action.DeletePolicy != nil:
		delete(c.policies, action.DeletePolicy.Namespace+"/"+action.DeletePolicy.Name)
	case action.CreateNamespace != nil:
		c.all, err = c.all.CreateNamespace(action.CreateNamespace.Namespace, action.CreateNamespace.Labels)
	case action.SetNamespaceLabels != nil:
		c.all, err = c.all.UpdateNamespaceLabels(action.SetNamespaceLabels.Namespace, action.SetNamespaceLabels.Labels)
	case action.DeleteNamespace != nil:
		c.all, err = c.all.DeleteNamespace(action.DeleteNamespace.Namespace)
	case action.CreatePod != nil:
		c.all, err = c.all.CreatePod(action.CreatePod.Namespace, action.CreatePod.Pod, action.CreatePod.Labels)
	case action.SetPodLabels != nil:
		c.all, err = c.all.SetPodLabels(action.SetPodLabels.Namespace, action.SetPodLabels.Pod, action.SetPodLabels.Labels)
	case action.DeletePod != nil:
		c.all, err = c.all.DeletePod(action.DeletePod.Namespace, action.DeletePod.Pod)
	case action.ReadNetworkPolicies == nil:
		err = fmt.Errorf("unknown action %+v", action)
	}
	c.address()
	return err
}

// compile returns what this node must have, on which all pods are.
func (c *cyclonusCluster) compile() *compiler.State {
	cluster := compiler.Cluster{Policies: slices.Collect(maps.Values(c.policies)), Namespaces: map[string]labels.Set{}}
	for name, set := range c.all.Namespaces {
		cluster.Namespaces[name] = set
	}
	for _, pod := range c.all.Pods {
		object := pod.KubePod()
		object.UID, object.Spec.NodeName = types.UID(pod.Namespace+"/"+pod.Name), "this"
		object.Status.PodIP = pod.IP
		cluster.Pods = append(cluster.Pods, compiler.PodOf(object))
	}
	return c.compiler.Compile(cluster)
}

// TestCyclonus compares what the node agent compiles with cyclonus' matcher, for all cases that cyclonus generates.
func TestCyclonus(t *testing.T) {
	steps, votes := 0, map[bool]int{}
	for _, prefix := range []string{"10.0.0.0/16", "fd00::/64"} {
		c := &cyclonusCluster{prefix: netip.MustParsePrefix(prefix), compiler: &compiler.Compiler{Node: "this"}}
		c.reset()
		last := c.all.Pods[len(c.all.Pods)-1].IP
		for _, test := range generator.NewTestCaseGenerator(true, last, []string{"x", "y", "z"}, nil, nil).GenerateTestCases() {
			c.reset()
			for i, step := range test.Steps {
				for _, action := range step.Actions {
					if err := c.act(action); err != nil {
						t.Fatalf("%s, step %d: %v", test.Description, i, err)
					}
				}
				steps++
				c.compare(t, fmt.Sprintf("%s, step %d", test.Description, i), step.Probe, votes)
			}
		}
	}
	if t.Logf("%d steps, %v", steps, votes); steps == 0 || votes[true] == 0 || votes[false] == 0 {
		t.Errorf("got %d steps, %v, want some of each", steps, votes)
	}
}

// compare judges the connections that a step probes, of each pod with all others.
func (c *cyclonusCluster) compare(t *testing.T, what string, config *generator.ProbeConfig, votes map[bool]int) {
	t.Helper()
	state, oracle := c.compile(), matcher.BuildNetworkPolicies(true, slices.Collect(maps.Values(c.policies)))
	jobs := (&probe.JobBuilder{}).GetJobsForProbeConfig(c.all, config)
	for _, job := range jobs.Valid {
		if job.FromKey == job.ToKey {
			continue // a pod always reaches itself
		}
		allowed := oracle.IsTrafficAllowed(job.Traffic())
		for direction, want := range []bool{allowed.Ingress.IsAllowed(), allowed.Egress.IsAllowed()} {
			own, peer := job.ToKey, netip.MustParseAddr(job.FromIP)
			if direction == 1 {
				own, peer = job.FromKey, netip.MustParseAddr(job.ToIP)
			}
			got := true
			if rules := state.Pods[own]; rules != nil {
				_, got = rules.Sets[direction].Verdict(ebpfmaps.Peer{Addr: peer, Class: state.Classes[peer]}, protocolNumbers[job.Protocol], uint16(job.ResolvedPort))
			}
			if votes[want]++; got != want {
				t.Errorf("%s: %s to %s, %s %d, direction %d: got %t, want %t", what, job.FromKey, job.ToKey, job.Protocol, job.ResolvedPort, direction, got, want)
			}
		}
	}
}

var protocolNumbers = map[corev1.Protocol]uint8{
	corev1.ProtocolTCP: uint8(ebpfmaps.TCP), corev1.ProtocolUDP: uint8(ebpfmaps.UDP), corev1.ProtocolSCTP: uint8(ebpfmaps.SCTP),
}
