package scenario

import (
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The device of a pod may be a netkit, and is a veth where the kernel has none.
func TestDeviceKinds(t *testing.T) {
	netkit := testenv.Netkit.Probe() == nil
	for _, kind := range []string{"netkit", "auto", "veth"} {
		t.Run(kind, func(t *testing.T) {
			if kind == "netkit" {
				testenv.Require(t, testenv.Netkit)
			}
			n := newNetworkOf(t, withKeys(`"ipMasq": true, "device": "`+kind+`"`))
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			want := "veth"
			if kind != "veth" && netkit {
				want = "netkit"
			}
			for _, pod := range []*testenv.Pod{a, web} {
				link, err := pod.Netlink().LinkByName(testenv.PodIfName)
				if err != nil {
					t.Fatal(err)
				}
				if link.Type() != want {
					t.Errorf("the pod's device is a %s, want a %s", link.Type(), want)
				}
				if err := pod.Check(testenv.Context(t)); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			n.podsWork(t, a, web)
		})
	}
}

// A kernel without is named.
func TestNoNetkit(t *testing.T) {
	if testenv.Netkit.Probe() == nil {
		return // TestDeviceKinds is for that
	}
	n := newNetworkOf(t, withKeys(`"device": "netkit"`))
	pod := n.NewPod(t, "a")
	if err := pod.Add(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "netkit") {
		t.Errorf("ADD: %v", err)
	}
	del(t, pod)
}
