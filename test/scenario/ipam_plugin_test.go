package scenario

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// callers are reference plugins, to be completed with an ipam key.
var callers = map[string]string{
	"bridge":  `{"type": "bridge", "bridge": "cni0", "isGateway": true, `,
	"ptp":     `{"type": "ptp", `,
	"macvlan": `{"type": "macvlan", "master": "eth0", `,
}

// reservationsOf returns the addresses that are reserved on disk for a container.
func reservationsOf(t *testing.T, id string) (addrs []netip.Addr) {
	t.Helper()
	files, err := os.ReadDir(filepath.Join(testenv.ReservationDir, "pods"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		addr, err := netip.ParseAddr(file.Name())
		if err != nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join(testenv.ReservationDir, "pods", file.Name()))
		if err == nil && slices.Contains(strings.Fields(string(text)), id) {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// A host migrates from host-local to ebpfnet-ipam, to ebpfnet, and back, while containers run. No address
// is assigned twice, and each plugin releases what another has reserved.
func TestIPAMMigration(t *testing.T) {
	testenv.Build(t, "./cmd/ebpfnet-ipam")
	lists := []string{
		firstPlugins["ptp"],
		callers["ptp"] + strings.Replace(referenceIPAM, `"host-local"`, `"ebpfnet-ipam"`, 1) + "}",
		`{"type": "ebpfnet", ` + referenceIPAM + "}",
	}
	n := newChain(t, lists[0])
	var pods []*testenv.Pod
	seen := map[netip.Addr]string{}
	for round := range 2 {
		for i, list := range lists {
			if err := n.SetNetwork([]byte(conflistOf(list))); err != nil {
				t.Fatal(err)
			}
			pod := n.NewPod(t, "pod"+string(rune('0'+round*len(lists)+i)))
			if err := pod.Add(testenv.Context(t)); err != nil {
				t.Fatal(err)
			}
			pods = append(pods, pod)
			for _, f := range testenv.Families {
				if other, taken := seen[f.Pod(pod)]; taken {
					t.Errorf("%s and %s both got %s", other, pod.Name, f.Pod(pod))
				}
				seen[f.Pod(pod)] = pod.Name
			}
		}
	}
	for i, pod := range pods { // by another list than ADD's, if that makes the same kind of device
		list := lists[i%len(lists)]
		if i%len(lists) < 2 {
			list = lists[1-i%len(lists)]
		}
		if err := n.SetNetwork([]byte(conflistOf(list))); err != nil {
			t.Fatal(err)
		}
		del(t, pod)
		if got := reservationsOf(t, pod.Conf.ContainerID); len(got) > 0 {
			t.Errorf("reservations of %s after DEL: got %v, want none", pod.Name, got)
		}
	}
}
