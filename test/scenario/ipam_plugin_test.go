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

// callers are reference plugins with ebpfnet-ipam in the place of host-local.
var callers = map[string]string{
	"bridge":  `{"type": "bridge", "bridge": "cni0", "isGateway": true, `,
	"ptp":     `{"type": "ptp", `,
	"macvlan": `{"type": "macvlan", "master": "eth0", `,
}

// The reference plugins get addresses from ebpfnet-ipam, one after the other, and give them back.
func TestIPAMPlugin(t *testing.T) {
	for name, caller := range callers {
		t.Run(name, func(t *testing.T) {
			testenv.Build(t, "./cmd/ebpfnet-ipam")
			list := caller + strings.Replace(referenceIPAM, `"host-local"`, `"ebpfnet-ipam"`, 1) + "}"
			n := chainOf(t, list)
			if err := n.SetNetwork([]byte(strings.Replace(conflistOf(list), `"1.0.0"`, `"1.1.0"`, 1))); err != nil {
				t.Fatal(err)
			}
			a, b := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
			for _, pod := range []*testenv.Pod{a, b} {
				if err := pod.Check(testenv.Context(t)); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			for _, f := range families {
				if f.pod(a) == f.pod(b) || !f.podSubnet.Contains(f.pod(a)) {
					t.Errorf("the pods have %s and %s", f.pod(a), f.pod(b))
				}
			}
			if name != "macvlan" { // whose host is not to be reached
				ping(t, a.Namespace, families[0].gateway)
			}
			if err := n.GC(testenv.Context(t), attachmentOf(a)); err != nil { // b's are stale, it says
				t.Errorf("GC: %v", err)
			}
			if got := reservationsOf(t, "b"); len(got) > 0 {
				t.Errorf("after GC, b has %v", got)
			}
			if got := reservationsOf(t, "a"); len(got) != 2 {
				t.Errorf("after GC, a has %v", got)
			}
			del(t, a)
			if got := reservationsOf(t, "a"); len(got) > 0 {
				t.Errorf("after DEL, a has %v", got)
			}
		})
	}
}

// reservationsOf are the addresses that a container has on disk.
func reservationsOf(t *testing.T, id string) (addrs []netip.Addr) {
	t.Helper()
	files, err := os.ReadDir(filepath.Join(reservations, "pods"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		addr, err := netip.ParseAddr(file.Name())
		if err != nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join(reservations, "pods", file.Name()))
		if err == nil && slices.Contains(strings.Fields(string(text)), id) {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// A host changes over from host-local to ebpfnet-ipam, to ebpfnet, and back, while containers live: no
// address is given twice, and each frees what the other has reserved.
func TestChangeOfIPAM(t *testing.T) {
	testenv.Build(t, "./cmd/ebpfnet-ipam")
	lists := []string{
		firstPlugins["ptp"],
		callers["ptp"] + strings.Replace(referenceIPAM, `"host-local"`, `"ebpfnet-ipam"`, 1) + "}",
		`{"type": "ebpfnet", ` + referenceIPAM + "}",
	}
	n := chainOf(t, lists[0])
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
			for _, f := range families {
				if other, taken := seen[f.pod(pod)]; taken {
					t.Errorf("%s was given to %s and %s", f.pod(pod), other, pod.Name)
				}
				seen[f.pod(pod)] = pod.Name
			}
		}
	}
	for i, pod := range pods { // by another list than it was made with, where that makes the same device
		list := lists[i%len(lists)]
		if i%len(lists) < 2 {
			list = lists[1-i%len(lists)]
		}
		if err := n.SetNetwork([]byte(conflistOf(list))); err != nil {
			t.Fatal(err)
		}
		del(t, pod)
		if got := reservationsOf(t, pod.Conf.ContainerID); len(got) > 0 {
			t.Errorf("after DEL, %s has %v", pod.Name, got)
		}
	}
}

// conflistOf is a network of the usual name.
func conflistOf(plugins ...string) string {
	return `{"cniVersion": "1.0.0", "name": "pods", "plugins": [` + strings.Join(plugins, ", ") + `]}`
}

// An address that is asked for, and the exhausted range, have the codes of ebpfnet itself.
func TestIPAMPluginErrors(t *testing.T) {
	testenv.Build(t, "./cmd/ebpfnet-ipam")
	n := chainOf(t, `{"type": "ptp", "capabilities": {"ips": true}, "ipam": {"type": "ebpfnet-ipam", "ranges": [[{"subnet": "10.88.0.0/30"}]]}}`)
	n.AddPod(t, "a", nil)
	for ip, code := range map[string]uint{"": 100, "10.88.0.2": 101, "10.99.0.1": cnitypes.ErrInvalidNetworkConfig} {
		pod := n.NewPod(t, "b")
		if ip != "" {
			pod.Conf.CapabilityArgs = map[string]any{"ips": []string{ip}}
		}
		err := pod.Add(testenv.Context(t))
		var coded *cnitypes.Error
		if !errors.As(err, &coded) || coded.Code != code {
			t.Errorf("ADD with %q: %v, want code %d", ip, err, code)
		}
	}
}
