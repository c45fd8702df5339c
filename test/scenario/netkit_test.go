package scenario

import (
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A pod's device is a netkit if it is configured and the kernel has it, else a veth. If it has to be one, and the kernel has
// none, ADD's error says so.
func TestDeviceKinds(t *testing.T) {
	netkit := testenv.Netkit.Probe() == nil
	for _, kind := range []string{"netkit", "auto", "veth"} {
		t.Run(kind, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(`"ipMasq": true, "device": "`+kind+`"`))
			if kind == "netkit" && !netkit {
				pod := n.NewPod(t, "a")
				if err := pod.Add(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "netkit") {
					t.Errorf("ADD: got %v, want an error that names netkit", err)
				}
				del(t, pod)
				testenv.Require(t, testenv.Netkit) // a kernel that should have it
			}
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			want := "veth"
			if kind != "veth" && netkit {
				want = "netkit"
			}
			for _, pod := range []*testenv.Pod{a, web} {
				link, err := pod.Netlink().LinkByName(testenv.PodIfName)
				testenv.Must(t, err)
				if link.Type() != want {
					t.Errorf("device of %s: got a %s, want a %s", pod.Name, link.Type(), want)
				}
				wantCheck(t, pod)
			}
			n.wantConnectivity(t, a, web)
		})
	}
}
