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

// withKeys puts more keys into the conflist of most stories.
func withKeys(keys string) string {
	return strings.Replace(podsConflist, `"ipMasq": true,`, keys+",", 1)
}

// Destinations of nonMasqueradeCIDRs see the pod's own address, others the node's.
func TestNonMasqueradeCIDRs(t *testing.T) {
	n := newNetworkOf(t, withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["198.51.100.0/24", "2001:db8:2::/64"]`))
	n.AddSecondUplink(t)
	n.RouteTo(t, podSubnet4)
	n.RouteTo(t, podSubnet6)
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		masqueraded := serve(t, n.Outside, protocol, at(f.outside, 0))
		exempt := serve(t, n.SecondOutside, protocol, at(f.secondOutside, 0))
		reachAsNode(t, pod.Namespace, protocol, masqueraded, n.Outside, f.node)
		reachAsOneself(t, pod.Namespace, protocol, exempt, n.SecondOutside)
		ping(t, pod.Namespace, f.secondOutside)
	})
}

// Each family has a switch of its own, which goes before ipMasq.
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
			n := newNetworkOf(t, withKeys(keys))
			n.RouteTo(t, podSubnet4)
			n.RouteTo(t, podSubnet6)
			pod := n.AddPod(t, "a", nil)
			byEachProtocol(t, func(t *testing.T, f family, protocol string) {
				server := serve(t, n.Outside, protocol, at(f.outside, 0))
				if masqueraded[f.name] {
					reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.node)
				} else {
					reachAsOneself(t, pod.Namespace, protocol, server, n.Outside)
				}
			})
		})
	}
}

// Two networks of one node exempt different destinations.
func TestExemptionsOfTwoNetworks(t *testing.T) {
	first := withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["192.0.2.0/24"]`)
	n := newNetworkOf(t, first)
	n.RouteTo(t, podSubnet4)
	exempt := n.AddPod(t, "a", nil)
	others := strings.NewReplacer(`"pods"`, `"others"`, "10.88.", "10.89.", "fd00:88:", "fd00:89:").Replace(podsConflist)
	if err := n.SetNetwork([]byte(others)); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(os.RemoveAll(filepath.Join(reservations, "others")), n.SetNetwork([]byte(first))); err != nil {
			t.Error(err)
		}
	}()
	f := families[0]
	masqueraded := n.AddPod(t, "b", nil)
	defer del(t, masqueraded)
	server := serve(t, n.Outside, "tcp", at(f.outside, 0))
	reachAsOneself(t, exempt.Namespace, "tcp", server, n.Outside)
	reachAsNode(t, masqueraded.Namespace, "tcp", server, n.Outside, f.node)
}

// CHECK sees that the datapath exempts what it should not, and that it does not know a network
// that it should exempt.
func TestCheckSeesExemptions(t *testing.T) {
	n := newNetworkOf(t, withKeys(`"ipMasq": true, "nonMasqueradeCIDRs": ["192.0.2.0/24"]`))
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
		t.Errorf("without its exemption: %v", err)
	}
}
