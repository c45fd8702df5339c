package scenario

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// callers are reference plugins, to be completed with an ipam key.
var callers = map[string]string{
	"bridge":  `{"type": "bridge", "bridge": "cni0", "isGateway": true, `,
	"ptp":     `{"type": "ptp", `,
	"macvlan": `{"type": "macvlan", "master": "eth0", `,
}

// Reference plugins get their addresses from ebpfnet-ipam and release them.
func TestIPAMPlugin(t *testing.T) {
	for name, caller := range callers {
		t.Run(name, func(t *testing.T) {
			testenv.Build(t, "./cmd/ebpfnet-ipam")
			list := caller + strings.Replace(referenceIPAM, `"host-local"`, `"ebpfnet-ipam"`, 1) + "}"
			n := newChain(t, list)
			if err := n.SetNetwork([]byte(allVerbs(conflistOf(list)))); err != nil {
				t.Fatal(err)
			}
			a, b := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
			wantCheck(t, a, b)
			for _, f := range testenv.Families {
				if f.Pod(a) == f.Pod(b) || !f.PodSubnet.Contains(f.Pod(a)) {
					t.Errorf("addresses: got %s and %s, want two of %s", f.Pod(a), f.Pod(b), f.PodSubnet)
				}
			}
			if name != "macvlan" { // which cannot reach its host
				ping(t, a.Namespace, testenv.IPv4.Gateway)
			}
			n.wantReleased(t, a, "b", 2)
		})
	}
}

// wantReleased wants a GC that keeps only the pod to release the addresses of the container other, and
// a DEL of the pod to release its own.
func (n *network) wantReleased(t *testing.T, pod *testenv.Pod, other string, addrs int) {
	t.Helper()
	if err := n.GC(testenv.Context(t), attachmentOf(pod)); err != nil {
		t.Errorf("GC: %v", err)
	}
	if got := reservationsOf(t, other); len(got) > 0 {
		t.Errorf("reservations of %s after GC: got %v, want none", other, got)
	}
	if got := reservationsOf(t, pod.Conf.ContainerID); len(got) != addrs {
		t.Errorf("reservations of %s after GC: got %v, want %d", pod.Name, got, addrs)
	}
	del(t, pod)
	if got := reservationsOf(t, pod.Conf.ContainerID); len(got) > 0 {
		t.Errorf("reservations of %s after DEL: got %v, want none", pod.Name, got)
	}
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

// ebpfnet-ipam reports ebpfnet's own codes for an exhausted range and an address that is taken.
func TestIPAMPluginErrors(t *testing.T) {
	testenv.Build(t, "./cmd/ebpfnet-ipam")
	n := newChain(t, `{"type": "ptp", "capabilities": {"ips": true}, "ipam": {"type": "ebpfnet-ipam", "ranges": [[{"subnet": "10.88.0.0/30"}]]}}`)
	n.AddPod(t, "a", nil)
	for ip, code := range map[string]uint{"": 100, "10.88.0.2": 101, "10.99.0.1": cnitypes.ErrInvalidNetworkConfig} {
		pod := n.NewPod(t, "b")
		if ip != "" {
			pod.Conf.CapabilityArgs = map[string]any{"ips": []string{ip}}
		}
		err := pod.Add(testenv.Context(t))
		var coded *cnitypes.Error
		if !errors.As(err, &coded) || coded.Code != code {
			t.Errorf("ADD with address %q: got %v, want code %d", ip, err, code)
		}
	}
}
