package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/apitest"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// TestReadObjects reads what kubectl apply does, and refuses other kinds, which it would leave out silently.
func TestReadObjects(t *testing.T) {
	const head = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: "
	const clusterHead = "apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: "
	for name, test := range map[string]struct{ text, want string }{
		"one":       {head + "{name: a}", "default/a"},
		"two":       {"---\n# nothing\n---\n" + head + "{name: a, namespace: shop}\n---\n" + head + "{name: b}\n", "shop/a default/b"},
		"both":      {clusterHead + "{name: c}\n---\n" + head + "{name: a}", "default/a /c"},
		"a tier":    {clusterHead + "{name: c, namespace: shop}\nspec: {tier: Admin}", "/c"},
		"JSON":      {`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "a"}}`, "default/a"},
		"none":      {"", "there is no policy"},
		"a kind":    {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}", "got v1 Pod, want networking.k8s.io/v1 NetworkPolicy or policy.networking.k8s.io/v1alpha2 ClusterNetworkPolicy"},
		"a version": {"apiVersion: policy.networking.k8s.io/v1alpha1\nkind: ClusterNetworkPolicy\nmetadata: {name: a}", "got policy.networking.k8s.io/v1alpha1 ClusterNetworkPolicy"},
		"not YAML":  {"{", "error"},
	} {
		change, err := readObjects(test.text)
		got := []string{}
		for _, object := range change.Policies {
			got = append(got, object.Namespace+"/"+object.Name)
		}
		for _, object := range change.ClusterPolicies {
			got = append(got, object.Namespace+"/"+object.Name)
		}
		if err != nil {
			got = []string{fmt.Sprint("error: ", err)}
		}
		if text := strings.Join(got, " "); !strings.Contains(text, test.want) || err == nil && text != test.want {
			t.Errorf("%s: got %s, want %s", name, text, test.want)
		}
	}
}

// TestPreview tries changes of policies of both kinds, while shop/admit admits web's peer a, and none-of-b denies b.
func TestPreview(t *testing.T) {
	const fromB = `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "admit", "namespace": "shop"},
		"spec": {"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]}}`
	clusterWide := func(name, action, peers string) string {
		return fmt.Sprintf("apiVersion: policy.networking.k8s.io/v1alpha2\nkind: ClusterNetworkPolicy\nmetadata: {name: %s}\n"+
			"spec: {tier: Admin, subject: {namespaces: {}}, %s, action: %s}]}\n---\n", name, peers, action)
	}
	const a, b = "ingress: [{from: [{pods: {podSelector: {matchLabels: {app: a}}}}]", "ingress: [{from: [{pods: {podSelector: {matchLabels: {app: b}}}}]"
	for name, test := range map[string]struct{ objects, deleted, want string }{
		"a policy replaced":     {fromB, "", ""},
		"a policy deleted":      {"", "shop/admit", ""},
		"one of each":           {fromB, "none-of-b", "b admitted: shop/admit ingress[0] admits it"},
		"added":                 {clusterWide("none-of-a", "Deny", a), "", "a ends: isolated by none-of-a, none-of-b, shop/admit: none-of-a ingress[0] denies it"},
		"the first":             {clusterWide("none-of-a", "Deny", a), "", "a ends: isolated by none-of-a, shop/admit: none-of-a ingress[0] denies it"},
		"the first, by nodes":   {clusterWide("no-nodes", "Deny", "egress: [{to: [{nodes: {}}]"), "", "node ends: isolated by no-nodes: no-nodes egress[0] denies it"},
		"replaced":              {clusterWide("none-of-b", "Deny", a), "", "a ends: isolated by none-of-b, shop/admit: none-of-b ingress[0] denies it"},
		"replaced, accepts":     {clusterWide("none-of-b", "Accept", b), "", "b admitted: none-of-b ingress[0] admits it"},
		"deleted, one is added": {clusterWide("some-of-b", "Accept", b), "none-of-b", "b admitted: some-of-b ingress[0] admits it"},
		"deleted":               {"", "none-of-b", ""},
		"deleted, both":         {"", "none-of-b,shop/admit", "b admitted: not isolated"},
		"not there":             {"", "none-of-z", "there is no policy none-of-z to delete"},
	} {
		t.Run(name, func(t *testing.T) {
			server := apitest.New()
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "other"}}
			node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}}
			present, err := readObjects(clusterWide("none-of-b", "Deny", b))
			if err != nil {
				t.Fatal(err)
			}
			crd := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "clusternetworkpolicies." + api.GroupName}}
			server.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, node, podObject("web", "this", 1, "web"),
				podObject("a", "other", 2, "a"), podObject("b", "other", 3, "b"), policyObject("admit", "a"))
			if !strings.HasPrefix(name, "the first") {
				server.Set(crd, present.ClusterPolicies[0])
			}
			names := []string{"a", "b", "node"}
			ask := nodestate.Preview{Objects: test.objects}
			if test.deleted != "" {
				ask.Deleted = strings.Split(test.deleted, ",")
			}
			for i, peer := range []string{"10.0.0.2", "10.0.0.3", "192.0.2.1"} {
				ask.Connections = append(ask.Connections, nodestate.Connection{
					Pod: netip.MustParseAddr("10.0.0.1"), Peer: netip.MustParseAddr(peer), IsEgress: names[i] == "node", Protocol: uint8(maps.TCP), Port: 80,
				})
			}
			if got := previewOf(t, server, ask, names); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// TestListenForRoot wants a socket for root alone, and none where the kernel refuses its mode.
func TestListenForRoot(t *testing.T) {
	const refused = "EBPFNET_REFUSED"

	path := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := listenForRoot(path)
	info, errStat := os.Stat(path)
	if os.Getenv(refused) != "" { // below
		if !errors.Is(err, os.ErrPermission) || errStat == nil {
			t.Errorf("got socket %v (%v), want none", info, err)
		}
		return
	}
	if err := errors.Join(err, errStat); err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("got %v (%v), want mode 0600", info, err)
	}
	listener.Close()
	cmd := exec.CommandContext(t.Context(), "strace", "-f", "-qq", "-o", "/dev/null",
		"-e", "inject=fchmodat:error=EPERM", os.Args[0], "-test.run", "^TestListenForRoot$")
	cmd.Env = append(os.Environ(), refused+"=1")
	if out, err := cmd.CombinedOutput(); err != nil && !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("refused: %v: %s", err, out)
	}
}

// previewOf returns what turns, with the connections' names, or the error.
func previewOf(t *testing.T, server *apitest.Server, ask nodestate.Preview, names []string) string {
	t.Helper()
	listener := httptest.NewServer(server)
	defer listener.Close()
	body, err := json.Marshal(ask)
	if err != nil {
		t.Fatal(err)
	}
	recorder := httptest.NewRecorder()
	(&previewer{api: &rest.Config{Host: listener.URL}, node: "this"}).ServeHTTP(recorder, httptest.NewRequest("POST", nodestate.PreviewPath, bytes.NewReader(body)))
	var answer nodestate.Previewed
	if json.Unmarshal(recorder.Body.Bytes(), &answer) != nil {
		return strings.TrimSpace(recorder.Body.String())
	}
	var list []string
	for _, turn := range answer.Turns {
		list = append(list, names[turn.Connection]+map[bool]string{false: " ends: ", true: " admitted: "}[turn.Admits]+turn.Why)
	}
	return strings.Join(append(list, answer.Warnings...), "; ")
}
