package cluster

import (
	"errors"
	"net"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestFullPolicies gives a pod its rules although those of pods that are gone have taken all room.
func TestFullPolicies(t *testing.T) {
	loaded, err := loader.Open(testenv.Context(t), loader.Options{})
	testenv.Must(t, err)
	defer loaded.Close()
	defer os.RemoveAll(loader.Root)
	dp, err := loader.OpenLoaded()
	testenv.Must(t, err)
	defer dp.Close()
	testenv.Must(t, dp.OpenOnDemand(bpf.MapPolicies))
	with := func(change func(*maps.Store) error) error { return maps.With(testenv.Context(t), dp, change) }

	device := maps.Device{IfIndex: 9, Owner: 1, Container: maps.Container(maps.PodToken("web")), IsPod: true, MAC: make(net.HardwareAddr, 6)}
	gone := make([]maps.OwnPolicy, dp.Policies.MaxEntries())
	for i := range gone {
		gone[i].Owner = loader.Owner(i + 2)
	}
	err = with(func(store *maps.Store) error {
		_, err := store.PutPodPolicies(gone)
		return errors.Join(store.PutDevice(device), err)
	})
	if !errors.Is(err, maps.ErrFull) {
		t.Fatalf("got %v, want %v", err, maps.ErrFull)
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "web"}, Spec: corev1.PodSpec{NodeName: "this"}}
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "closed"}}
	cluster := policies.Cluster{Pods: []*policies.Pod{policies.PodOf(pod)}, Policies: []*networkingv1.NetworkPolicy{policy}}
	state := (&policies.Compiler{Node: "this"}).Compile(cluster)
	testenv.Must(t, with(func(store *maps.Store) error {
		have, err := policies.Look(dp)
		testenv.Must(t, err)
		_, err = policies.Difference(state, have, true).Apply(dp, store)
		return err
	}))
	all, err := maps.Policies(dp)
	testenv.Must(t, err)
	got, _, err := maps.GetDevice(dp, device.IfIndex)
	if len(all) != 1 || all[0].Owner != maps.PodToken("web") || got.Policy != all[0].Index || err != nil {
		t.Errorf("got %d policies, and device %+v (%v), want the pod's policy alone", len(all), got, err)
	}
}
