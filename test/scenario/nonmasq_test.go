package scenario

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Destinations in nonMasqueradeCIDRs see the pod's own address, all others the node's.
func TestNonMasqueradeCIDRs(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["198.51.100.0/24", "2001:db8:2::/64"]`))
	n.AddSecondUplink(t)
	n.routeToPods(t)
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		masqueraded := serve(t, n.Outside, protocol, at(f.Outside, 0))
		unmasqueraded := serve(t, n.SecondOutside, protocol, at(f.SecondOutside, 0))
		reachAsNode(t, pod.Namespace, protocol, masqueraded, n.Outside, f.Node)
		reachUntranslated(t, pod.Namespace, protocol, unmasqueraded, n.SecondOutside)
		ping(t, pod.Namespace, f.SecondOutside)
	})
}

// ipMasq4 and ipMasq6 override ipMasq.
func TestMasqueradeOneFamily(t *testing.T) {
	for keys, masqueraded := range map[string]map[string]bool{
		`"ipMasq": true, "ipMasq6": false`: {"IPv4": true},
		`"ipMasq4": true`:                  {"IPv4": true},
		`"ipMasq": true, "ipMasq4": false`: {"IPv6": true},
		`"ipMasq": false, "ipMasq6": true`: {"IPv6": true},
		`"ipMasq4": true, "ipMasq6": true`: {"IPv4": true, "IPv6": true},
		`"ipMasq": true, "ipMasq4": null`:  {"IPv4": true, "IPv6": true},
	} {
		t.Run(keys, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(keys))
			n.routeToPods(t)
			pod := n.AddPod(t, "a", nil)
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				server := serve(t, n.Outside, protocol, at(f.Outside, 0))
				if masqueraded[f.Name] {
					reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.Node)
				} else {
					reachUntranslated(t, pod.Namespace, protocol, server, n.Outside)
				}
			})
		})
	}
}

// Each of two networks on a node has its own nonMasqueradeCIDRs.
func TestNonMasqueradeCIDRsOfTwoNetworks(t *testing.T) {
	first := withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["192.0.2.0/24"]`)
	n := newNetworkWith(t, first)
	n.routeToPods(t)
	unmasqueraded := n.AddPod(t, "a", nil)
	others := strings.NewReplacer(`"pods"`, `"others"`, "10.88.", "10.89.", "fd00:88:", "fd00:89:").Replace(podsConflist)
	if err := n.SetNetwork([]byte(others)); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(os.RemoveAll(filepath.Join(testenv.ReservationDir, "others")), n.SetNetwork([]byte(first))); err != nil {
			t.Error(err)
		}
	}()
	f := testenv.IPv4
	masqueraded := n.AddPod(t, "b", nil)
	defer del(t, masqueraded)
	server := serve(t, n.Outside, "tcp", at(f.Outside, 0))
	reachUntranslated(t, unmasqueraded.Namespace, "tcp", server, n.Outside)
	reachAsNode(t, masqueraded.Namespace, "tcp", server, n.Outside, f.Node)
}

// CHECK reports a non-masquerade CIDR that the datapath lacks.
func TestCheckNonMasqueradeCIDRs(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["192.0.2.0/24"]`))
	pod := n.AddPod(t, "a", nil)
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		var key bpf.PrefixKey
		if err := datapath.NonmasqCidrs.NextKey(nil, &key); err != nil {
			t.Fatal(err)
		}
		if err := datapath.NonmasqCidrs.Delete(&key); err != nil {
			t.Fatal(err)
		}
	})
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "192.0.2.0/24") {
		t.Errorf("CHECK without the CIDR: got %v, want an error that names it", err)
	}
}
