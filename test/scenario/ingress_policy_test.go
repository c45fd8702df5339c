package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	reasonPolicy   = maps.Reason(bpf.ReasonPolicyIngress)
	reasonSrcRange = maps.Reason(bpf.ReasonSrcRange)
)

// wantDenied sends a request, and wants no response, but a drop counted for the pod with the reason.
func (n *network) wantDenied(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, pod *testenv.Pod, reason maps.Reason) {
	t.Helper()
	before := n.dropsOf(t, pod)[reason]
	ctx, stop := context.WithCancel(testenv.Context(t))
	defer stop()
	done := make(chan error, 1)
	go func() {
		reply, err := testenv.Ask(ctx, from, protocol, to, "hello")
		if err == nil {
			err = fmt.Errorf("reply from %s", reply.Server)
		}
		done <- err
	}()
	testenv.Eventually(t, fmt.Sprintf("a drop of %s to %s by %s", from.Name, to, protocol), func() error {
		if n.dropsOf(t, pod)[reason] == before {
			return fmt.Errorf("drops for %q: got %d, want more", reason, before)
		}
		return nil
	})
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%s to %s by %s: got %v, want no response", from.Name, to, protocol, err)
	}
}

// ctl runs ebpfnetctl on the node.
func (n *network) ctl(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), args...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	testenv.Must(t, n.node().Do(cmd.Start))
	if err := cmd.Wait(); err != nil {
		t.Fatalf("ebpfnetctl %q: %v: %s", args, err, &out)
	}
	return out.String()
}

// secondNetwork is another network on the same node.
func (n *network) secondNetwork(t *testing.T) *network {
	t.Helper()
	conflist := strings.NewReplacer(`"pods"`, `"second"`, "10.88.0.", "10.89.0.", "fd00:88:", "fd00:89:").Replace(podsConflist)
	return &network{n.Topology, testenv.NewRuntime(t, n.node(), []byte(conflist), n.PluginPath...)}
}

// serviceRules translate a service's address to a pod's, like kube-proxy's.
func serviceRules(web *testenv.Pod) string {
	return fmt.Sprintf(`table inet services { chain pre { type nat hook prerouting priority -100; policy accept;
		ip daddr 10.96.0.1 dnat ip to %s
		ip6 daddr fd00:96::1 dnat ip6 to %s
	} }`, web.Addr4(), web.Addr6())
}

func serviceOf(f testenv.Family) netip.Addr {
	if f.Is4() {
		return netip.MustParseAddr("10.96.0.1")
	}
	return netip.MustParseAddr("fd00:96::1")
}

// policyCase is an ingressPolicy and the pods it admits.
type policyCase struct {
	policy                     string
	sameNetwork, secondNetwork bool
}

// Each policy holds for the pod's address, a service's address and a host port.
func TestIngressPolicy(t *testing.T) {
	for _, tc := range []policyCase{
		{"open", true, true},
		{"same-network", true, false},
		{"isolated", false, false},
	} {
		for _, attached := range []string{"tcx", "clsact"} {
			t.Run(tc.policy+" by "+attached, func(t *testing.T) {
				if attached == "tcx" {
					testenv.Require(t, testenv.TCX)
				}
				n := newNetworkWith(t, withKeys(`"ipMasq": true, "ingressPolicy": "`+tc.policy+`"`))
				if attached == "clsact" {
					n.loadForClsact(t)
				}
				web := n.AddPod(t, "web", mapBoth(8080, 80))
				n.nft(t, serviceRules(web))
				neighbor, stranger := n.AddPod(t, "a", nil), n.secondNetwork(t).AddPod(t, "s", mapBoth(9090, 90))
				n.wantPolicy(t, tc, web, neighbor, stranger)
				wantCheck(t, web)
			})
		}
	}
}

// wantPolicy sends to web from a neighbor of its network, from a stranger of another, from the node and from
// the outside.
func (n *network) wantPolicy(t *testing.T, tc policyCase, web, neighbor, stranger *testenv.Pod) {
	t.Helper()
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		for pod, admitted := range map[*testenv.Pod]bool{neighbor: tc.sameNetwork, stranger: tc.secondNetwork} {
			addrs := []netip.AddrPort{at(f.Pod(web), 80), at(f.Node, 8080)}
			if *fastPath != "always" { // which bypasses the rules of services
				addrs = append(addrs, at(serviceOf(f), 80))
			}
			for _, to := range addrs {
				if admitted {
					reach(t, pod.Namespace, protocol, to, web.Namespace)
				} else {
					n.wantDenied(t, pod.Namespace, protocol, to, web, reasonPolicy)
				}
			}
		}
		// The host, the outside and the pod itself are always admitted.
		for _, to := range []netip.AddrPort{at(f.Pod(web), 80), at(f.Node, 8080), at(f.Loopbacks[0], 8080)} {
			reach(t, n.node(), protocol, to, web.Namespace)
		}
		ping(t, n.node(), f.Pod(web))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		reach(t, web.Namespace, protocol, at(f.Node, 8080), web.Namespace)

		// Replies to its own connections are admitted.
		ping(t, web.Namespace, f.Outside)
		reachAsNode(t, web.Namespace, protocol, serve(t, n.Outside, protocol, at(f.Outside, 0)), n.Outside, f.Node)
		serve(t, stranger.Namespace, protocol, at(f.Pod(stranger), 90))
		reachUntranslated(t, web.Namespace, protocol, at(f.Pod(stranger), 90), stranger.Namespace)
		reach(t, web.Namespace, protocol, at(f.Node, 9090), stranger.Namespace)
		ping(t, web.Namespace, f.Pod(stranger))
		wantRefused(t, web.Namespace, protocol, at(f.Pod(stranger), 91))
		if tc.policy != "open" { // a fragmented reply
			testenv.NoError(t, testenv.Ping(testenv.Context(t), web.Namespace, f.Pod(stranger), "-s", "4000"))
		}
	})
}

// Each of two containers whose ids' tokens have the same lower half (of SHA-256 over "", id) is isolated from the other.
func TestIngressPolicyOfSimilarTokens(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ingressPolicy": "isolated"`))
	a, b := n.AddPod(t, "c15015", nil), n.AddPod(t, "c33383", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, a.Namespace, protocol, at(f.Pod(a), 80))
		n.wantDenied(t, b.Namespace, protocol, at(f.Pod(a), 80), a, reasonPolicy)
	})
}

// The policy changes while pods run. Connections that the pod has opened continue.
func TestIngressPolicyChanges(t *testing.T) {
	n := newNetwork(t)
	web, a := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	stranger := n.secondNetwork(t).AddPod(t, "s", mapBoth(9090, 90))
	n.nft(t, serviceRules(web))
	f := testenv.IPv4
	server := serve(t, a.Namespace, "tcp", at(f.Pod(a), 0))
	client := connect(t, web.Namespace, "tcp", netip.AddrPort{}, server)
	defer client.Close()
	ask(t, client, a.Namespace)

	for _, step := range []struct {
		filter string
		tc     policyCase
	}{
		{"pods/web", policyCase{"isolated", false, false}},
		{"pods/web/eth0", policyCase{"same-network", true, false}},
		{"pods", policyCase{"open", true, true}},
	} {
		if out := n.ctl(t, "set", step.filter, "ingressPolicy="+step.tc.policy); !strings.Contains(out, "web") {
			t.Errorf("ebpfnetctl set: got %q, want it to name web", out)
		}
		ask(t, client, a.Namespace)
		n.wantPolicy(t, step.tc, web, a, stranger)
		wantCheck(t, web)
	}
}

// Behind a bridge, pods' packets to each other never reach the host's stack.
func TestIngressPolicyBehindBridge(t *testing.T) {
	n := newChain(t, firstPlugins["bridge"], `{"type": "ebpfnet", "ipMasq": true, "ingressPolicy": "isolated", "capabilities": {"portMappings": true}}`)
	web, a := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	n.ctl(t, "set", "pods/a", "ingressPolicy=open")
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		serve(t, a.Namespace, protocol, at(f.Pod(a), 90))
		n.wantDenied(t, a.Namespace, protocol, at(f.Pod(web), 80), web, reasonPolicy)
		n.wantDenied(t, a.Namespace, protocol, at(f.Node, 8080), web, reasonPolicy)
		reachUntranslated(t, web.Namespace, protocol, at(f.Pod(a), 90), a.Namespace)
		ping(t, web.Namespace, f.Pod(a))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		reach(t, n.node(), protocol, at(f.Pod(web), 80), web.Namespace)
	})
	s := a.Sender(t, web)
	s.HostMAC = web.MACOf(t, testenv.PodIfName)
	s.Remote4, s.Remote6 = web.Addr4(), web.Addr6()
	before := n.dropsOf(t, web)[reasonPolicy]
	want := uint64(0)
	for _, frame := range s.Legal() { // VLAN 0 does not evade the policy
		if strings.HasPrefix(frame.Name, "in a VLAN") || strings.HasPrefix(frame.Name, "UDP") {
			want++
			testenv.Must(t, a.SendFrames(testenv.PodIfName, frame.Bytes))
		}
	}
	testenv.Eventually(t, "the frames to be dropped", func() error {
		if got := n.dropsOf(t, web)[reasonPolicy] - before; got < want {
			return fmt.Errorf("drops: got %d, want %d", got, want)
		}
		return nil
	})
}

// portSources limits the clients of a host port. The host itself always has access.
func TestPortSources(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "args": {"cni": {"portSources": [
		{"hostPort": 8080, "protocol": "tcp", "sources": ["192.0.2.0/24", "2001:db8:1::/64"]},
		{"hostPort": 8080, "protocol": "udp", "sources": ["192.0.2.0/24", "2001:db8:1::2/128"]},
		{"hostPort": 1234, "sources": ["192.0.2.0/24"]}
	]}}`))
	n.AddSecondUplink(t)
	web, a, spoofer := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil), n.AddPod(t, "spoofer", nil)
	n.ctl(t, "set", "pods/spoofer", "antiSpoof=false")
	for _, command := range [][]string{ // addresses within the source ranges
		{"ip", "address", "add", "192.0.2.2/32", "dev", testenv.PodIfName},
		{"ip", "address", "add", "2001:db8:1::2/128", "dev", testenv.PodIfName, "nodad"},
		{"ip", "route", "replace", "default", "via", testenv.IPv4.Gateway.String(), "src", "192.0.2.2"},
		{"ip", "-6", "route", "replace", "default", "via", testenv.IPv6.Gateway.String(), "dev", testenv.PodIfName, "src", "2001:db8:1::2"},
	} {
		if out, err := spoofer.Run(testenv.Context(t), command[0], command[1:]...); err != nil {
			t.Fatal(out, err)
		}
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		n.wantDenied(t, spoofer.Namespace, protocol, at(f.Node, 8080), web, reasonSrcRange)
		n.wantDenied(t, n.SecondOutside, protocol, at(f.SecondNode, 8080), web, reasonSrcRange)
		n.wantDenied(t, a.Namespace, protocol, at(f.Node, 8080), web, reasonSrcRange)
		n.wantDenied(t, web.Namespace, protocol, at(f.Node, 8080), web, reasonSrcRange)
		reachUntranslated(t, a.Namespace, protocol, at(f.Pod(web), 80), web.Namespace)
		for _, to := range []netip.Addr{f.Node, f.Loopbacks[0]} {
			reach(t, n.node(), protocol, at(to, 8080), web.Namespace)
		}
	})
	wantCheck(t, web)
}
