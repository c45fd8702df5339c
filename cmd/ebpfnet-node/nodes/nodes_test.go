package nodes

import (
	"context"
	"fmt"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/apitest"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/watch"
)

const timeout = time.Minute // a fault

var created = time.Unix(1_700_000_000, 0).UTC()

// fullNode returns a Node object with what real ones have.
func fullNode(name string, podCIDRs ...string) *corev1.Node {
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, UID: "6a1ddcd0-0000-4000-8000-000000000001", CreationTimestamp: metav1.NewTime(created),
			Labels:      map[string]string{"kubernetes.io/hostname": name},
			Annotations: map[string]string{"node.alpha.kubernetes.io/ttl": "0"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet", Operation: "Update",
				FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 4096))}},
		},
		Spec: corev1.NodeSpec{PodCIDRs: podCIDRs, Taints: []corev1.Taint{{Key: "a", Effect: "NoSchedule"}}},
		Status: corev1.NodeStatus{
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeExternalIP, Address: "203.0.113.9"},
				{Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeInternalIP, Address: "2001:db8::1"},
			},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}},
		},
	}
	if len(podCIDRs) > 0 {
		node.Spec.PodCIDR = podCIDRs[0]
	}
	for n := range 50 {
		node.Status.Images = append(node.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("image-%d@sha256:%064d", n, n)}, SizeBytes: 1 << 30})
	}
	return node
}

func fullObject(name string) *object {
	o := &object{node: desired.Node{Name: name}}
	o.Name = name
	return o
}

func desiredNode(name string, podCIDRs ...string) desired.Node {
	return desired.Node{Name: name, Created: created, PodCIDRs: podCIDRs, Addresses: []string{"192.0.2.1", "2001:db8::1"}}
}

// next waits for a change, and returns the nodes.
func next(t *testing.T, w *Watcher) []desired.Node {
	t.Helper()
	select {
	case <-w.Changed():
	case <-time.After(timeout):
		t.Fatalf("got no change in %v; the last error was %v", timeout, w.Err())
	}
	nodes, synced := w.List()
	if !synced {
		t.Fatal("a change came before the first full list")
	}
	return nodes
}

// until waits for a state that the events of several changes lead to.
func until(t *testing.T, w *Watcher, want ...desired.Node) {
	t.Helper()
	for !reflect.DeepEqual(next(t, w), want) {
	}
}

// TestWatch follows changes, from servers that stream lists and those that do not.
func TestWatch(t *testing.T) {
	for _, streaming := range []bool{true, false} {
		t.Run(fmt.Sprintf("streaming=%v", streaming), func(t *testing.T) {
			api := newAPI(t, streaming)
			api.Put(fullNode("a", "10.244.1.0/24", "fd44:1::/64"), fullNode("b"))
			w := api.watched(t)
			first := next(t, w)
			if want := []desired.Node{desiredNode("a", "10.244.1.0/24", "fd44:1::/64"), desiredNode("b")}; !reflect.DeepEqual(first, want) {
				t.Fatalf("got %+v, want %+v", first, want)
			}
			api.awaitWatch(t)
			api.Put(fullNode("b", "10.244.2.0/24"))
			until(t, w, desiredNode("a", "10.244.1.0/24", "fd44:1::/64"), desiredNode("b", "10.244.2.0/24"))
			api.Remove("a")
			until(t, w, desiredNode("b", "10.244.2.0/24"))
			if err := w.Err(); err != nil {
				t.Errorf("got error %v, want none", err)
			}
			requests, bad := api.Requests()
			listed := slices.ContainsFunc(requests, func(r string) bool { return strings.Contains(r, "watch= ") })
			if listed == streaming {
				t.Errorf("got requests %q, want a list: %v", requests, !streaming)
			}
			for _, what := range bad {
				t.Errorf("a request %s", what)
			}
		})
	}
}

// TestPages reads a list of more nodes than a page has.
func TestPages(t *testing.T) {
	const count = 2*watch.PageSize + 1
	api := newAPI(t, false)
	for n := range count {
		api.Put(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%04d", n)}})
	}
	nodes := next(t, api.watched(t))
	if len(nodes) != count || nodes[0].Name != "node-0000" || nodes[count-1].Name != "node-1000" {
		t.Errorf("got %d nodes, want %d", len(nodes), count)
	}
	requests, _ := api.Requests()
	lists := slices.DeleteFunc(requests, func(r string) bool { return !strings.Contains(r, "watch= ") })
	if len(lists) != 3 {
		t.Errorf("got lists %q, want three pages", lists)
	}
}

// TestExpiredWatch finds what it has missed: a node that went, one that came, one that changed.
func TestExpiredWatch(t *testing.T) {
	for _, streaming := range []bool{true, false} {
		t.Run(fmt.Sprintf("streaming=%v", streaming), func(t *testing.T) {
			api := newAPI(t, streaming)
			api.Put(fullNode("a", "10.244.1.0/24"), fullNode("b", "10.244.2.0/24"))
			w := api.watched(t)
			next(t, w)
			api.awaitWatch(t)
			api.RemoveSilently("a")
			api.Expire()
			until(t, w, desiredNode("b", "10.244.2.0/24"))
			api.awaitWatch(t)
			api.Put(fullNode("c", "10.244.3.0/24"))
			until(t, w, desiredNode("b", "10.244.2.0/24"), desiredNode("c", "10.244.3.0/24"))
		})
	}
}

// TestHeartbeats wakes nobody: the next change that is seen is a real one.
func TestHeartbeats(t *testing.T) {
	api := newAPI(t, true)
	api.Put(fullNode("a", "10.244.1.0/24"))
	w := api.watched(t)
	next(t, w)
	api.awaitWatch(t)
	for range 5 {
		api.Put(fullNode("a", "10.244.1.0/24")) // another time of the heartbeat, another version
	}
	api.Put(fullNode("b", "10.244.2.0/24"))
	if got := next(t, w); len(got) != 2 {
		t.Errorf("got a change with nodes %+v, want none before node b", got)
	}
}

// TestBatch has one change for many events that come before the reader looks.
func TestBatch(t *testing.T) {
	w, err := New(&rest.Config{Host: "http://unused.invalid"})
	if err != nil {
		t.Fatal(err)
	}
	_ = w.Replace(nil, "1")
	for n := range 100 {
		_ = w.Add(fullObject(fmt.Sprintf("node-%02d", n)))
	}
	if got := next(t, w); len(got) != 100 {
		t.Errorf("got %d nodes, want 100", len(got))
	}
	select {
	case <-w.Changed():
		t.Error("got a second change, want one for all")
	default:
	}
}

// TestAPIDown starts without an API server, says why it knows nothing, and continues when there is one.
func TestAPIDown(t *testing.T) {
	api := newAPI(t, true)
	api.SetDown(true)
	api.Put(fullNode("a", "10.244.1.0/24"))
	w := api.watched(t)
	await(t, "an error", func() bool { return w.Err() != nil })
	if nodes, synced := w.List(); synced || len(nodes) > 0 {
		t.Errorf("got nodes %v, synced %v, want none", nodes, synced)
	}
	api.SetDown(false)
	until(t, w, desiredNode("a", "10.244.1.0/24"))
	if err := w.Err(); err != nil {
		t.Errorf("got error %v, want none", err)
	}
}

// TestReconnect continues by another connection, as after one whose address is gone.
func TestReconnect(t *testing.T) {
	api := newAPI(t, true)
	api.Put(fullNode("a", "10.244.1.0/24"))
	w := api.watched(t)
	next(t, w)
	api.awaitWatch(t)
	before, _ := api.Requests()
	w.Reconnect()
	await(t, "another watch", func() bool {
		after, _ := api.Requests()
		return len(after) > len(before)
	})
	api.awaitWatch(t)
	api.Put(fullNode("b", "10.244.2.0/24"))
	until(t, w, desiredNode("a", "10.244.1.0/24"), desiredNode("b", "10.244.2.0/24"))
}

// TestUnmarshal compares with Kubernetes' own decoder.
func TestUnmarshal(t *testing.T) {
	old := fullNode("old")
	old.Spec.PodCIDR = "10.244.1.0/24" // before dual stack
	for name, test := range map[string]struct {
		node *corev1.Node
		want desired.Node
	}{
		"full":  {fullNode("full", "10.244.1.0/24", "fd44:1::/64"), desiredNode("full", "10.244.1.0/24", "fd44:1::/64")},
		"old":   {old, desiredNode("old", "10.244.1.0/24")},
		"empty": {&corev1.Node{}, desired.Node{Created: time.Unix(0, 0).UTC()}},
	} {
		data, err := test.node.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		var got object
		if err := got.Unmarshal(data); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for cut := range len(data) {
			if field := data[:cut]; new(corev1.Node).Unmarshal(field) != nil && new(object).Unmarshal(field) == nil {
				t.Fatalf("%s: got no error for the first %d bytes of %d", name, cut, len(data))
			}
		}
		if !reflect.DeepEqual(got.node, test.want) {
			t.Errorf("%s: got %+v, want %+v", name, got.node, test.want)
		}
	}
}

// FuzzUnmarshal requires that what Kubernetes reads is read the same way, and that nothing panics.
func FuzzUnmarshal(f *testing.F) {
	for _, node := range []*corev1.Node{fullNode("a", "10.244.1.0/24"), {}} {
		node.Status.Images, node.ManagedFields = nil, nil
		data, err := node.Marshal()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var got object
		if err := got.Unmarshal(data); err != nil {
			return
		}
		var kubernetes corev1.Node
		if err := kubernetes.Unmarshal(data); err != nil {
			return
		}
		if got.Name != kubernetes.Name || got.ResourceVersion != kubernetes.ResourceVersion {
			t.Errorf("got name %q, version %q, want %q, %q", got.Name, got.ResourceVersion, kubernetes.Name, kubernetes.ResourceVersion)
		}
		podCIDRs := kubernetes.Spec.PodCIDRs
		if len(podCIDRs) == 0 && kubernetes.Spec.PodCIDR != "" {
			podCIDRs = []string{kubernetes.Spec.PodCIDR}
		}
		if !slices.Equal(got.node.PodCIDRs, podCIDRs) {
			t.Errorf("got podCIDRs %q, want %q", got.node.PodCIDRs, podCIDRs)
		}
		var addresses []string
		for _, address := range kubernetes.Status.Addresses {
			if address.Type == corev1.NodeInternalIP {
				addresses = append(addresses, address.Address)
			}
		}
		if !slices.Equal(got.node.Addresses, addresses) {
			t.Errorf("got addresses %q, want %q", got.node.Addresses, addresses)
		}
	})
}

// api is a server that runs until the test ends.
type api struct {
	*apitest.Server
	url string
}

func newAPI(t *testing.T, streaming bool) *api {
	t.Helper()
	a := &api{Server: apitest.New()}
	a.SetStreaming(streaming)
	server := httptest.NewServer(a)
	t.Cleanup(server.Close)
	a.url = server.URL
	return a
}

// watched returns a watcher that runs until the test ends.
func (a *api) watched(t *testing.T) *Watcher {
	t.Helper()
	w, err := New(&rest.Config{Host: a.url})
	if err != nil {
		t.Fatal(err)
	}
	w.Backoff = &wait.Backoff{Duration: time.Millisecond}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	return w
}

// awaitWatch waits until the server has a watch.
func (a *api) awaitWatch(t *testing.T) {
	t.Helper()
	await(t, "a watch", func() bool { return a.Watches() > 0 })
}

// await asks until a condition holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(timeout); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got no %s in %v", what, timeout)
		}
	}
}
