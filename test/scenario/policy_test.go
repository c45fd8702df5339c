package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	reasonPolicyEgress = maps.Reason(bpf.ReasonPolicyEgress)
	reasonPolicyAudit  = maps.Reason(bpf.ReasonPolicyAudit)
)

// policyRow is a policy in a configuration's keys, and what it admits. The peers are a and s, pods in the networks pods and second, out, outside
// the host, and node. The probes are in policyProbes; * means all.
type policyRow struct {
	name, keys string
	in, out    string
}

var policyProbes = []string{"tcp80", "tcp85", "udp80", "ping"}

var policyRows = []policyRow{
	{"nothing", `"policy": {}`, "a* s* out* node*", "a* s* out* node*"},
	{"ingress of nobody", `"policy": {"ingress": []}`, "node*", "a* s* out* node*"},
	{"egress to nobody", `"policy": {"egress": []}`, "a* s* out* node*", "node*"},
	{"nobody", `"policy": {"ingress": [], "egress": []}`, "node*", "node*"},
	{"everybody", `"policy": {"ingress": [{}], "egress": [{}]}`, "a* s* out* node*", "a* s* out* node*"},
	{"except", `"policy": {"ingress": [{"from": [{"cidr": "10.88.0.0/15", "except": ["10.89.0.0/24"]}, {"cidr": "fd00::/16", "except": ["fd00:89::/64"]}]}],
		"egress": [{"to": [{"cidr": "0.0.0.0/0", "except": ["10.88.0.0/24"]}, {"cidr": "::/0", "except": ["fd00:88::/64"]}]}]}`,
		"a* node*", "s* out* node*"},
	{"networks and ports", `"policy": {"ingress": [{"from": [{"network": "second"}], "ports": [{"protocol": "tcp", "port": 80, "endPort": 85}]},
			{"from": [{"sameNetwork": true}], "ports": [{"protocol": "udp"}]}],
		"egress": [{"to": [{"network": "pods"}], "ports": [{"port": 81, "endPort": 65535}, {"protocol": "udp", "port": 80}]},
			{"to": [{"cidr": "192.0.2.2/32"}, {"cidr": "2001:db8:1::2/128"}], "ports": [{"port": 80}]}]}`,
		"s:tcp80,tcp85 a:udp80 node*", "a:tcp85,udp80 out:tcp80 node*"},
	{"without the host", `"policy": {"host": false}`, "a* s* out*", "a* s* out*"},
	{"only one port of the host", `"policy": {"host": false, "ingress": [{"from": [{"sameNetwork": true}]}],
		"egress": [{"to": [{"cidr": "10.88.0.1/32"}, {"cidr": "fd00:88::1/128"}], "ports": [{"protocol": "udp", "port": 80}]}]}`, "a*", "node:udp80"},
	{"internal", `"policy": {"internal": true}`, "a* node*", "a* node*"},
	{"isolated", `"ingressPolicy": "isolated"`, "out* node*", "a* s* out* node*"},
	{"same-network", `"ingressPolicy": "same-network"`, "a* out* node*", "a* s* out* node*"},
}

// admits reports whether the words of a row name a probe of a peer.
func admits(words, peer, probe string) bool {
	for _, word := range strings.Fields(words) {
		if word == peer+"*" {
			return true
		}
		if probes, ok := strings.CutPrefix(word, peer+":"); ok && strings.Contains(","+probes+",", ","+probe+",") {
			return true
		}
	}
	return false
}

func TestPolicy(t *testing.T) {
	for _, path := range []string{"established", "auto", "always", "clsact"} {
		t.Run(path, func(t *testing.T) {
			keys := `"ipMasq": true`
			if path != "clsact" {
				keys += `, "fastPath": "` + path + `"`
			}
			n := newNetworkWith(t, withKeys(keys))
			if path == "clsact" {
				n.loadForClsact(t)
			}
			peers := n.policyPeers(t)
			for i, row := range policyRows {
				t.Run(row.name, func(t *testing.T) {
					pod := n.addWith(t, fmt.Sprintf("pod%d", i), keys+`, `+row.keys, nil)
					for _, f := range testenv.Families {
						servePolicyProbes(t, pod.Namespace, f.Pod(pod))
						t.Run(f.Name, func(t *testing.T) { n.wantRow(t, f, row, pod, peers(f), policyProbes...) })
					}
				})
			}
			t.Run("audit", func(t *testing.T) {
				pod := n.addWith(t, "audited", keys+`, "policyMode": "audit", "policy": {"ingress": [], "egress": []}`, nil)
				all := policyRow{in: "a* s* out* node*", out: "a* s* out* node*"}
				for _, f := range testenv.Families {
					servePolicyProbes(t, pod.Namespace, f.Pod(pod))
					before := n.dropsOf(t, pod)[reasonPolicyAudit]
					n.wantRow(t, f, all, pod, peers(f), policyProbes...)
					if got := n.dropsOf(t, pod)[reasonPolicyAudit] - before; got < 2*3*4 { // each probe of a, s, and out
						t.Errorf("%s: %d packets reported, want one for each probe at least", f.Name, got)
					}
				}
			})
		})
	}
}

// addWith adds a pod with keys of its own.
func (n *network) addWith(t *testing.T, name, keys string, capabilities map[string]any) *testenv.Pod {
	t.Helper()
	testenv.Must(t, n.SetNetwork([]byte(withKeys(keys))))
	pod := n.AddPod(t, name, capabilities)
	wantCheck(t, pod)
	return pod
}

type policyPeer struct {
	name string
	ns   *testenv.Namespace
	addr netip.Addr
}

// policyPeers starts the peers of a policyRow.
func (n *network) policyPeers(t *testing.T) func(testenv.Family) []policyPeer {
	t.Helper()
	a, s := n.AddPod(t, "a", nil), n.secondNetwork(t).AddPod(t, "s", nil)
	peers := func(f testenv.Family) []policyPeer {
		return []policyPeer{{"a", a.Namespace, f.Pod(a)}, {"s", s.Namespace, f.Pod(s)}, {"out", n.Outside, f.Outside}, {"node", n.node(), f.Gateway}}
	}
	for _, f := range testenv.Families {
		n.RouteTo(t, f.PodSubnet)
		for _, peer := range peers(f) {
			servePolicyProbes(t, peer.ns, peer.addr)
		}
	}
	return peers
}

func servePolicyProbes(t *testing.T, ns *testenv.Namespace, addr netip.Addr) {
	t.Helper()
	for _, port := range []uint16{80, 85} {
		serve(t, ns, "tcp", at(addr, port))
	}
	serve(t, ns, "udp", at(addr, 80))
}

// wantRow probes both directions between a pod and its peers.
func (n *network) wantRow(t *testing.T, f testenv.Family, row policyRow, pod *testenv.Pod, peers []policyPeer, probes ...string) {
	t.Helper()
	for _, peer := range peers {
		for _, probe := range probes {
			n.wantProbe(t, probe, peer.ns, pod.Namespace, f.Pod(pod), pod, admits(row.in, peer.name, probe), reasonPolicy)
			n.wantProbe(t, probe, pod.Namespace, peer.ns, peer.addr, pod, admits(row.out, peer.name, probe), reasonPolicyEgress)
		}
	}
}

// wantProbe sends a probe, and wants a reply to it, or that it is dropped and counted for the pod.
func (n *network) wantProbe(t *testing.T, probe string, from, server *testenv.Namespace, to netip.Addr, pod *testenv.Pod, admitted bool, reason maps.Reason) {
	t.Helper()
	name := fmt.Sprintf("%s from %s to %s", probe, from.Name, server.Name)
	if admitted {
		if err := runProbe(testenv.Context(t), probe, from, server, to); err != nil {
			t.Errorf("%s: %v (drops %v)", name, err, n.dropsOf(t, pod))
		}
		return
	}
	other := map[maps.Reason]maps.Reason{reasonPolicy: reasonPolicyEgress, reasonPolicyEgress: reasonPolicy}[reason]
	before := n.dropsOf(t, pod)[other]
	err := n.asksInVain(t, name, pod, reason, func(ctx context.Context) error { return runProbe(ctx, probe, from, server, to) })
	if err == nil {
		t.Errorf("%s: got a reply, want none", name)
	}
	if got := n.dropsOf(t, pod)[other] - before; got > 0 {
		t.Errorf("%s: the server has replied: got %d more drops for %q, want none", name, got, other)
	}
}

// runProbe sends a ping, or a number of requests.
func runProbe(ctx context.Context, probe string, from, server *testenv.Namespace, to netip.Addr) error {
	if probe == "ping" {
		return testenv.Ping(ctx, from, to)
	}
	protocol := strings.TrimRight(probe, "0123456789")
	port, err := strconv.ParseUint(probe[len(protocol):], 10, 16)
	if err != nil {
		return err
	}
	if protocol == "sctp" {
		return askSCTP(ctx, from, server, at(to, uint16(port)))
	}
	client, err := testenv.NewClient(ctx, from, protocol, netip.AddrPort{}, at(to, uint16(port)))
	if err != nil {
		return err
	}
	defer client.Close()
	for range 12 {
		reply, err := client.Ask(ctx, "hello")
		if err == nil && reply.Server != server.Name {
			err = errors.New("reply from " + reply.Server)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
