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

// asksInVain asks until a packet is dropped for the pod, with the reason, and returns what ask returns. None of its packets is
// under way any more, so the next call does not count them.
func (n *network) asksInVain(t *testing.T, name string, pod *testenv.Pod, reason maps.Reason, ask func(context.Context) error) error {
	t.Helper()
	before := n.dropsOf(t, pod)[reason]
	dropped := func() error {
		if drops := n.dropsOf(t, pod); drops[reason] == before {
			return fmt.Errorf("no more drops for %q, of %v", reason, drops)
		}
		return nil
	}
	ctx, stop := context.WithCancel(testenv.Context(t))
	defer stop()
	done := make(chan error, 1)
	go func() { done <- ask(ctx) }()
	testenv.Eventually(t, name+" to be dropped", func() error {
		if len(done) > 0 {
			return nil
		}
		return dropped()
	})
	stop()
	errAsked := <-done
	if err := dropped(); err != nil {
		t.Errorf("%s has ended with %v: %v", name, errAsked, err)
	}
	testenv.DrainBacklog(t)
	return errAsked
}

// wantDenied sends a request, and wants no response, but a drop counted for the pod with the reason.
func (n *network) wantDenied(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, pod *testenv.Pod, reason maps.Reason) {
	t.Helper()
	name := fmt.Sprintf("%s to %s by %s", from.Name, to, protocol)
	err := n.asksInVain(t, name, pod, reason, func(ctx context.Context) error {
		_, err := testenv.Ask(ctx, from, protocol, to, "hello")
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%s: got %v, want no response", name, err)
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

// Each of two containers whose ids' tokens have the same lower half (of SHA-256 over "", id) is isolated from the other.
func TestIngressPolicyOfSimilarTokens(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ingressPolicy": "isolated"`))
	a, b := n.AddPod(t, "c15015", nil), n.AddPod(t, "c33383", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, a.Namespace, protocol, at(f.Pod(a), 80))
		n.wantDenied(t, b.Namespace, protocol, at(f.Pod(a), 80), a, reasonPolicy)
	})
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
	var frames [][]byte
	for _, frame := range s.Legal() { // VLAN 0 does not evade the policy
		if strings.HasPrefix(frame.Name, "in a VLAN") || strings.HasPrefix(frame.Name, "UDP") {
			frames = append(frames, frame.Bytes)
		}
	}
	n.awaitDrops(t, "the frames", web, reasonPolicy, uint64(len(frames)), func() { testenv.Must(t, a.SendFrames(testenv.PodIfName, frames...)) })
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
