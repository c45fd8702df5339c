package cluster

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/conflist"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const manifests = "../../cmd/ebpfnet-node/manifests/"

// documents returns the documents of a manifest.
func documents(t *testing.T, name string) [][]byte {
	t.Helper()
	return bytes.Split(testenv.ReadFile(t, manifests+name), []byte("\n---\n"))
}

// decode reads a document, in which Kubernetes must know all fields.
func decode(t *testing.T, document []byte, into any) {
	t.Helper()
	testenv.Must(t, yaml.UnmarshalStrict(document, into))
}

func daemonSet(t *testing.T) *appsv1.DaemonSet {
	t.Helper()
	set := &appsv1.DaemonSet{}
	decode(t, documents(t, "daemonset.yaml")[0], set)
	return set
}

// TestRightsOfAPI are to read nodes, and for NetworkPolicy four other kinds and one definition.
func TestRightsOfAPI(t *testing.T) {
	var account corev1.ServiceAccount
	var role rbacv1.ClusterRole
	var binding rbacv1.ClusterRoleBinding
	for i, into := range []any{&account, &role, &binding} {
		decode(t, documents(t, "rights.yaml")[i], into)
	}
	want := []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: []string{"get", "list", "watch"}}}
	if !reflect.DeepEqual(role.Rules, want) {
		t.Errorf("got rules %+v, want %+v", role.Rules, want)
	}
	var policyRole rbacv1.ClusterRole
	var policyBinding rbacv1.ClusterRoleBinding
	decode(t, documents(t, "policy-rights.yaml")[0], &policyRole)
	decode(t, documents(t, "policy-rights.yaml")[1], &policyBinding)
	want[0].APIGroups, want[0].Resources = []string{"networking.k8s.io"}, []string{"networkpolicies"}
	want = append(want, rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"namespaces", "pods"}, Verbs: want[0].Verbs},
		rbacv1.PolicyRule{APIGroups: []string{"policy.networking.k8s.io"}, Resources: []string{"clusternetworkpolicies"}, Verbs: want[0].Verbs},
		rbacv1.PolicyRule{APIGroups: []string{"apiextensions.k8s.io"}, Resources: []string{"customresourcedefinitions"},
			ResourceNames: []string{"clusternetworkpolicies.policy.networking.k8s.io"}, Verbs: want[0].Verbs})
	if !reflect.DeepEqual(policyRole.Rules, want) {
		t.Errorf("got rules %+v, want %+v", policyRole.Rules, want)
	}
	subject := rbacv1.Subject{Kind: "ServiceAccount", Name: account.Name, Namespace: "kube-system"}
	if binding.RoleRef.Name != role.Name || !slices.Equal(binding.Subjects, []rbacv1.Subject{subject}) {
		t.Errorf("got binding %+v, want one of the account to the role", binding)
	}
	if policyBinding.RoleRef.Name != policyRole.Name || !slices.Equal(policyBinding.Subjects, binding.Subjects) {
		t.Errorf("got binding %+v, want one of the account to the role", policyBinding)
	}
	if name := daemonSet(t).Spec.Template.Spec.ServiceAccountName; name != account.Name {
		t.Errorf("got the DaemonSet's account %q, want %q", name, account.Name)
	}
}

// TestDaemonSet has arguments that the agent knows, and a template that it takes. Its rights are in test/chart.
func TestDaemonSet(t *testing.T) {
	container := daemonSet(t).Spec.Template.Spec.Containers[0]
	n := &node{Namespace: testenv.New(t, "node"), t: t, options: container.Args, capabilities: []string{"net_admin"}}
	if output, err := n.command(testenv.Context(t), "--help").CombinedOutput(); err != nil || !bytes.Contains(output, []byte("Usage: ebpfnet-node")) {
		t.Errorf("%q: got %s (%v), want them to be known", container.Args, output, err)
	}
	var template corev1.ConfigMap
	decode(t, documents(t, "conflist.yaml")[0], &template)
	if got := template.Data["template"]; got != string(conflist.Default) {
		t.Errorf("got template %s, want the agent's default %s", got, conflist.Default)
	}
}

// limitMemlock gives this process the limit on locked memory that kernels before 5.16 begin with, until the test ends.
func limitMemlock(t *testing.T) {
	t.Helper()
	var old unix.Rlimit
	testenv.Must(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old))
	testenv.Must(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: 64 << 10}))
	t.Cleanup(func() { testenv.Must(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)) })
}

// TestRightsOfAgent runs an agent with the manifest's capabilities, and without each of them. Where maps count as
// locked memory, it needs another one.
func TestRightsOfAgent(t *testing.T) {
	c := newIdleCluster(t)
	n := c.nodes[0]
	c.api.Put(n.object())
	var needed []string
	for _, name := range daemonSet(t).Spec.Template.Spec.Containers[0].SecurityContext.Capabilities.Add {
		needed = append(needed, strings.ToLower(string(name)))
	}
	if mapsAreLocked(t) {
		needed = append(needed, "sys_resource")
		limitMemlock(t) // this process may have raised its own limit, which the agents inherit
	}
	for i, missing := range needed {
		n.capabilities = slices.Delete(slices.Clone(needed), i, i+1)
		n.startAgent()
		n.awaitUnready("this host cannot run ebpfnet")
		t.Logf("without %s: refused", missing)
		n.agent.kill()
	}
	n.capabilities = needed
	n.startAgent()
	n.awaitReady()
}
