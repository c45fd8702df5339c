package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Pods with rules fill the table of flows: what their rules, and those of others, do not admit stays out, and nobody
// else loses a connection.
func TestPolicyFloodOfFlowTable(t *testing.T) {
	const openOnly = smallestTable + `, "policy": {"ingress": [], "egress": [{}]}`
	n := newNetworkWith(t, withKeys(smallestTable))
	n.nft(t, forAttacks)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", quietPorts())
	quiet := n.openQuietPairs(t, a, web)
	n.answerAttackers(t)
	jailed := n.addWith(t, "jailed", smallestTable+`, "policy": {"ingress": [], "egress": []}`, nil)
	var bad []*testenv.Pod
	for i := range 4 {
		testenv.Must(t, n.SetNetwork([]byte(withKeys(openOnly))))
		bad = append(bad, n.newAttacker(t, i))
	}
	testenv.Must(t, n.SetNetwork([]byte(withKeys(smallestTable))))
	for _, attack := range []attack{attacks[0], attacks[1], answeredTCP} {
		t.Run(attack.name, func(t *testing.T) {
			attack.run(t, bad, 0)
			for _, f := range testenv.Families {
				n.wantProbe(t, "udp80", a.Namespace, bad[0].Namespace, f.Pod(bad[0]), bad[0], false, reasonPolicy)
				n.wantProbe(t, "udp80", a.Namespace, jailed.Namespace, f.Pod(jailed), jailed, false, reasonPolicy)
				n.wantProbe(t, "tcp80", jailed.Namespace, n.Outside, f.Outside, jailed, false, reasonPolicyEgress)
				n.wantAllDropped(t, a, at(f.Pod(bad[0]), 80), bad[0], reasonPolicy)
				n.wantAllDropped(t, jailed, at(f.Outside, 80), jailed, reasonPolicyEgress)
			}
			wantQuiet(t, quiet)
			n.wantRoom(t, attack, bad)
		})
	}
}

// wantAllDropped sends datagrams of so many connections that the table has no place for some.
func (n *network) wantAllDropped(t *testing.T, from *testenv.Pod, to netip.AddrPort, pod *testenv.Pod, reason maps.Reason) {
	t.Helper()
	const number = 512
	f := testenv.IPv4
	if to.Addr().Is6() {
		f = testenv.IPv6
	}
	var packets []testenv.Packet
	for i := range number {
		packets = append(packets, testenv.UDPPacket(at(f.Pod(from), manyPort(i)), to, "x"))
	}
	n.awaitDrops(t, fmt.Sprintf("all datagrams to %s", to), pod, reason, number, func() { wireOf(t, from).send(t, packets...) })
}

// Without room for its rules, a pod is not added. Others are: those without rules, and those whose rules are known. Without
// room for the connections that a pod has, these end when it gets rules.
func TestPolicyFullMaps(t *testing.T) {
	const rules = `"ipMasq": true, "policy": {"ingress": [{"from": [{"cidr": "10.88.0.0/%d"}], "ports": [{"port": 80}]}], "egress": []}`
	n := newNetworkWith(t, withKeys(`"ipMasq": true`))
	known := fmt.Sprintf(rules, 24)
	jailed, free := n.addWith(t, "jailed", known, nil), n.addWith(t, "free", `"ipMasq": true`, nil)
	f := testenv.IPv4
	addr := func(i uint32) bpf.Addr {
		return bpf.Addr{Bytes: [16]uint8{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}}
	}
	unused := 24
	for name, tc := range map[string]struct {
		key   func(i uint32) any
		value any

		knownNeeds, newNeeds bool // whether pods with known or new rules need room
	}{
		bpf.MapPolicies: {func(i uint32) any { return i + 2 }, bpf.Policy{Owner: 1}, true, true},
		bpf.MapPolicyBlocks: {func(i uint32) any {
			return bpf.PrefixKey{Prefixlen: 64, Set: 1<<24 - 1, Addr: addr(i)}
		}, uint32(1), false, true},
		bpf.MapPolicyRules: {func(i uint32) any {
			return bpf.RuleKey{Prefixlen: 96, Set: 1<<24 - 1, Peer: i}
		}, bpf.Rule{}, false, true},
		bpf.MapRuleSets:      {func(i uint32) any { return 1<<24 + i }, bpf.RuleSet{}, false, true},
		bpf.MapAdmittedFlows: {func(i uint32) any { return bpf.FlowKey{Remote: addr(i)} }, bpf.AdmittedFlow{Owner: 1}, false, false},
		bpf.MapPeerClasses:   {func(i uint32) any { return addr(i) }, uint32(1), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			if name == bpf.MapPolicyRules && testing.Short() {
				t.Skip("a million entries take a minute in a guest")
			}
			var filled *ebpf.Map
			n.withDatapath(t, func(dp *loader.Datapath) {
				testenv.Must(t, dp.OpenOnDemand(name))
				var err error
				filled, err = map[string]*ebpf.Map{
					bpf.MapPolicies: dp.Policies, bpf.MapPolicyBlocks: dp.PolicyBlocks, bpf.MapPolicyRules: dp.PolicyRules, bpf.MapRuleSets: dp.RuleSets,
					bpf.MapAdmittedFlows: dp.AdmittedFlows, bpf.MapPeerClasses: dp.PeerClasses,
				}[name].Clone()
				testenv.Must(t, err)
			})
			defer filled.Close()
			used, errFull := uint32(0), error(nil)
			for errFull == nil {
				if errFull = filled.Put(tc.key(used), tc.value); errFull == nil {
					used++
				}
			}
			if used == 0 || !errors.Is(errFull, unix.E2BIG) && !errors.Is(errFull, unix.ENOSPC) {
				t.Fatalf("filling the map: got %v after %d entries, want it full", errFull, used)
			}
			unused++
			for _, prefix := range []int{unused, 24} { // DEL of the latter removes rule sets without a policy
				refused := map[int]bool{unused: tc.newNeeds, 24: tc.knownNeeds}[prefix]
				testenv.Must(t, n.SetNetwork([]byte(withKeys(fmt.Sprintf(rules, prefix)))))
				pod := n.NewPod(t, fmt.Sprint(name, prefix))
				err := pod.Add(testenv.Context(t))
				var coded *cnitypes.Error
				if isFull := errors.As(err, &coded) && coded.Code == cnitypes.ErrTryAgainLater; isFull != refused || err != nil && !isFull {
					t.Errorf("ADD with the prefix length %d: got %v; refused: want %v", prefix, err, refused)
				}
				del(t, pod)
			}
			other := n.addWith(t, "other-"+name, `"ipMasq": true`, nil)
			serve(t, other.Namespace, "udp", at(f.Pod(other), 80))
			n.wantProbe(t, "udp80", free.Namespace, other.Namespace, f.Pod(other), other, true, reasonPolicy)
			n.wantProbe(t, "udp80", free.Namespace, jailed.Namespace, f.Pod(jailed), jailed, false, reasonPolicy)
			if name == bpf.MapAdmittedFlows {
				client := connect(t, other.Namespace, "tcp", netip.AddrPort{}, serve(t, free.Namespace, "tcp", at(f.Pod(free), 80)))
				defer client.Close()
				n.isolate(t, other)
				n.wantEnded(t, "request after the isolation", client, other, reasonPolicy)
			}
			del(t, other)
			for i := range used {
				if name == bpf.MapPolicies { // an array
					testenv.Must(t, filled.Put(tc.key(i), bpf.Policy{}))
				} else if err := filled.Delete(tc.key(i)); !errors.Is(err, ebpf.ErrKeyNotExist) {
					testenv.Must(t, err)
				}
			}
		})
	}
}
