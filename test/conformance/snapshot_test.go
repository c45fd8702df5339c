package conformance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// snapshot lists what exists on the node, for attachments or otherwise, and in the given containers.
func (h *host) snapshot(t *testing.T, containers ...*testenv.Namespace) testenv.Snapshot {
	t.Helper()
	s, err := testenv.NodeSnapshot(h.Node, containers...)
	if err != nil {
		t.Fatalf("take a snapshot: %v", err)
	}
	return s
}

// wantUnchanged fails the test for each difference from an earlier snapshot.
func (h *host) wantUnchanged(t *testing.T, before testenv.Snapshot, containers ...*testenv.Namespace) {
	t.Helper()
	added, removed := before.Compare(h.snapshot(t, containers...))
	for _, thing := range added {
		t.Errorf("added: %s", thing)
	}
	for _, thing := range removed {
		t.Errorf("removed: %s", thing)
	}
}

// waitUnchanged is wantUnchanged after changes that the kernel makes in the background: it removes a
// namespace with its devices.
func (h *host) waitUnchanged(t *testing.T, before testenv.Snapshot, containers ...*testenv.Namespace) {
	t.Helper()
	err := testenv.Wait(testenv.Context(t), "the state of the snapshot", func() error {
		after, err := testenv.NodeSnapshot(h.Node, containers...)
		if err != nil {
			return err
		}
		if added, removed := before.Compare(after); len(added)+len(removed) > 0 {
			return fmt.Errorf("added %q, removed %q", added, removed)
		}
		return nil
	})
	testenv.NoError(t, err)
}

// TestSnapshotIsComplete proves that the snapshots on which all tests here rely contain everything that an
// ADD creates.
func TestSnapshotIsComplete(t *testing.T) {
	h := newLoadingHost(t)
	conf := with(with(dual("1.0.0"), "runtimeConfig.portMappings", webPort), "runtimeConfig.aliases", list{"web"})
	conf = with(conf, "nonMasqueradeCIDRs", list{"10.0.0.0/8"})
	conf = with(conf, "args.cni.portSources", list{object{"hostPort": 8080, "sources": list{"192.0.2.0/24"}}})
	p := h.pod(t, "c1", conf)
	before := h.snapshot(t, p.Namespace)
	result := p.add(t)
	after := h.snapshot(t, p.Namespace)

	added, removed := before.Compare(after)
	text := strings.Join(added, "\n")
	want := []string{
		"node: link " + result.Interfaces[0].Name,
		"node: address 10.88.0.1/32 on ",
		"node: address fd00:88::1/128 on ",
		"node: route to 10.88.0.2/32 via ",
		"container pod-c1: link eth0",
		"container pod-c1: address 10.88.0.2/16 on eth0",
		"container pod-c1: route to 0.0.0.0/0 via 10.88.0.1 by eth0",
		"device " + result.Interfaces[0].Name + " (ebpfnet pods c1 eth0)",
		`file /var/lib/cni/networks/pods/10.88.0.2: "c1\r\neth0"`,
		"file /run/ebpfnet/netns-",
		"endpoint 10.88.0.2",
		"endpoint fd00:88::2",
		"host port tcp 0.0.0.0:8080 forwards to 10.88.0.2:80",
		"host port tcp [::]:8080 forwards to [fd00:88::2]:80",
		"device entry ",
		"2 entries in map endpoints",
		"1 entries in map devices",
		"4 entries in map host_ports", // two of them for replies
		"2 entries in map prefixes",   // nonMasqueradeCIDRs, and sources of a host port
	}
	if testenv.TCX.Probe() == nil {
		want = append(want, "links/loopback-to_loopback")
	}
	for _, thing := range want {
		if !strings.Contains(text, thing) {
			t.Errorf("snapshot lacks %q:\n%s", thing, text)
		}
	}
	if len(removed) != 0 {
		t.Errorf("removed by ADD: got %v, want nothing", removed)
	}
	if back, gone := after.Compare(before); len(back) != 0 || len(gone) != len(added) {
		t.Errorf("the same compared in reverse: added %v, removed %v", back, gone)
	}
}
