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
	byPolicy = maps.Reason(bpf.ReasonPolicy)
	byClient = maps.Reason(bpf.ReasonSrcRange)
)

// refused asks, and wants no answer, but a drop counted of the pod for the reason.
func (n *network) refused(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, pod *testenv.Pod, reason maps.Reason) {
	t.Helper()
	before := n.dropsOf(t, pod)[reason]
	ctx, stop := context.WithCancel(testenv.Context(t))
	defer stop()
	asked := make(chan error, 1)
	go func() {
		answer, err := testenv.Ask(ctx, from, protocol, to, "let me in")
		if err == nil {
			err = fmt.Errorf("%s answers", answer.Server)
		}
		asked <- err
	}()
	testenv.Eventually(t, fmt.Sprintf("the drop of %s to %s by %s", from.Name, to, protocol), func() error {
		if n.dropsOf(t, pod)[reason] == before {
			return errors.New("not counted")
		}
		return nil
	})
	stop()
	if err := <-asked; !errors.Is(err, context.Canceled) {
		t.Errorf("%s asks %s by %s: %v, want silence", from.Name, to, protocol, err)
	}
}

// ctl runs ebpfnetctl on the node.
func (n *network) ctl(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), args...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := n.node().Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("ebpfnetctl %q: %v: %s", args, err, &out)
	}
	return out.String()
}

// strangers is a second network on the node, whose pods are others to those of the first.
func (n *network) strangers(t *testing.T) *network {
	t.Helper()
	conflist := strings.NewReplacer(`"pods"`, `"strangers"`, "10.88.0.", "10.89.0.", "fd00:88:", "fd00:89:").Replace(podsConflist)
	return &network{n.Topology, testenv.NewRuntime(t, n.node(), []byte(conflist), n.PluginPath...)}
}

// serviceRules lead a service's address to a pod, as kube-proxy's do.
func serviceRules(web *testenv.Pod) string {
	return fmt.Sprintf(`table inet services { chain pre { type nat hook prerouting priority -100; policy accept;
		ip daddr 10.96.0.1 dnat ip to %s
		ip6 daddr fd00:96::1 dnat ip6 to %s
	} }`, web.Addr4(), web.Addr6())
}

func serviceOf(f family) netip.Addr {
	if f.pod == nil || f.node.Is4() {
		return netip.MustParseAddr("10.96.0.1")
	}
	return netip.MustParseAddr("fd00:96::1")
}

// policyStory is who may come in: neighbours are pods of the same network.
type policyStory struct {
	policy               string
	neighbours, stranger bool
}

// Each policy on every path: by the pod's address, by a service's, by a host port.
func TestIngressPolicy(t *testing.T) {
	for _, story := range []policyStory{
		{"open", true, true},
		{"same-network", true, false},
		{"isolated", false, false},
	} {
		for _, attached := range []string{"tcx", "clsact"} {
			t.Run(story.policy+" by "+attached, func(t *testing.T) {
				if attached == "tcx" {
					testenv.Require(t, testenv.TCX)
				}
				n := newNetworkOf(t, withKeys(`"ipMasq": true, "ingressPolicy": "`+story.policy+`"`))
				if attached == "clsact" {
					n.loadForClsact(t)
				}
				web := n.AddPod(t, "web", mapBoth(8080, 80))
				n.nft(t, serviceRules(web))
				neighbour, stranger := n.AddPod(t, "a", nil), n.strangers(t).AddPod(t, "s", mapBoth(9090, 90))
				n.policyHolds(t, story, web, neighbour, stranger)
				if err := web.Check(testenv.Context(t)); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			})
		}
	}
}

func (n *network) policyHolds(t *testing.T, story policyStory, web, neighbour, stranger *testenv.Pod) {
	t.Helper()
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		for pod, admitted := range map[*testenv.Pod]bool{neighbour: story.neighbours, stranger: story.stranger} {
			ways := []netip.AddrPort{at(f.pod(web), 80), at(f.node, 8080)}
			if *fastPath != "always" { // past the rules of services
				ways = append(ways, at(serviceOf(f), 80))
			}
			for _, to := range ways {
				if admitted {
					reach(t, pod.Namespace, protocol, to, web.Namespace)
				} else {
					n.refused(t, pod.Namespace, protocol, to, web, byPolicy)
				}
			}
		}
		// The host, the outside and the pod itself always.
		for _, to := range []netip.AddrPort{at(f.pod(web), 80), at(f.node, 8080), at(f.loopbacks()[0], 8080)} {
			reach(t, n.node(), protocol, to, web.Namespace)
		}
		ping(t, n.node(), f.pod(web))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
		reach(t, web.Namespace, protocol, at(f.node, 8080), web.Namespace)

		// What it opens is answered.
		ping(t, web.Namespace, f.outside)
		reachAsNode(t, web.Namespace, protocol, serve(t, n.Outside, protocol, at(f.outside, 0)), n.Outside, f.node)
		serve(t, stranger.Namespace, protocol, at(f.pod(stranger), 90))
		reachAsOneself(t, web.Namespace, protocol, at(f.pod(stranger), 90), stranger.Namespace)
		reach(t, web.Namespace, protocol, at(f.node, 9090), stranger.Namespace)
		ping(t, web.Namespace, f.pod(stranger))
		isRefused(t, web.Namespace, protocol, at(f.pod(stranger), 91))
		if story.policy != "open" { // in fragments
			if err := testenv.Ping(testenv.Context(t), web.Namespace, f.pod(stranger), "-s", "4000"); err != nil {
				t.Error(err)
			}
		}
	})
}

// A policy is changed while pods live. Connections that the pod has opened go on.
func TestIngressPolicyChanges(t *testing.T) {
	n := newNetwork(t)
	web, a := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	stranger := n.strangers(t).AddPod(t, "s", mapBoth(9090, 90))
	n.nft(t, serviceRules(web))
	f := families[0]
	server := serve(t, a.Namespace, "tcp", at(f.pod(a), 0))
	client := connect(t, web.Namespace, "tcp", netip.AddrPort{}, server)
	defer client.Close()
	ask(t, client, a.Namespace)

	for _, step := range []struct {
		set   string
		story policyStory
	}{
		{"pods/web", policyStory{"isolated", false, false}},
		{"pods/web/eth0", policyStory{"same-network", true, false}},
		{"pods", policyStory{"open", true, true}},
	} {
		if out := n.ctl(t, "set", step.set, "ingressPolicy="+step.story.policy); !strings.Contains(out, "web") {
			t.Errorf("ebpfnetctl says %q", out)
		}
		ask(t, client, a.Namespace)
		n.policyHolds(t, step.story, web, a, stranger)
		if err := web.Check(testenv.Context(t)); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	}
}

// Behind a bridge pods meet before the host's stack sees them.
func TestIngressPolicyBehindBridge(t *testing.T) {
	n := chainOf(t, firstPlugins["bridge"], `{"type": "ebpfnet", "ipMasq": true, "ingressPolicy": "isolated", "capabilities": {"portMappings": true}}`)
	web, a := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	n.ctl(t, "set", "pods/a", "ingressPolicy=open")
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		serve(t, a.Namespace, protocol, at(f.pod(a), 90))
		n.refused(t, a.Namespace, protocol, at(f.pod(web), 80), web, byPolicy)
		n.refused(t, a.Namespace, protocol, at(f.node, 8080), web, byPolicy)
		reachAsOneself(t, web.Namespace, protocol, at(f.pod(a), 90), a.Namespace)
		ping(t, web.Namespace, f.pod(a))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
		reach(t, n.node(), protocol, at(f.pod(web), 80), web.Namespace)
	})
	s := n.senderOf(t, a, web)
	s.HostMAC = web.MACOf(t, testenv.PodIfName)
	s.Remote4, s.Remote6 = web.Addr4(), web.Addr6()
	before := n.dropsOf(t, web)[byPolicy]
	wanted := uint64(0)
	for _, frame := range s.Legal() { // VLAN 0 is no way round
		if strings.HasPrefix(frame.Name, "in a VLAN") || strings.HasPrefix(frame.Name, "UDP") {
			wanted++
			if err := a.SendFrames(testenv.PodIfName, frame.Bytes); err != nil {
				t.Fatal(err)
			}
		}
	}
	testenv.Eventually(t, "frames to be refused", func() error {
		if got := n.dropsOf(t, web)[byPolicy] - before; got < wanted {
			return fmt.Errorf("%d of %d", got, wanted)
		}
		return nil
	})
}

// A host port may be for some clients only; the host is always one of them.
func TestPortSources(t *testing.T) {
	n := newNetworkOf(t, withKeys(`"ipMasq": true, "args": {"cni": {"portSources": [
		{"hostPort": 8080, "protocol": "tcp", "sources": ["192.0.2.0/24", "2001:db8:1::/64"]},
		{"hostPort": 8080, "protocol": "udp", "sources": ["192.0.2.0/24", "2001:db8:1::2/128"]},
		{"hostPort": 1234, "sources": ["192.0.2.0/24"]}
	]}}`))
	n.AddSecondUplink(t)
	web, a, liar := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil), n.AddPod(t, "liar", nil)
	n.ctl(t, "set", "pods/liar", "antiSpoof=false")
	for _, command := range [][]string{ // one that is among the sources
		{"ip", "address", "add", "192.0.2.2/32", "dev", testenv.PodIfName},
		{"ip", "address", "add", "2001:db8:1::2/128", "dev", testenv.PodIfName, "nodad"},
		{"ip", "route", "replace", "default", "via", families[0].gateway.String(), "src", "192.0.2.2"},
		{"ip", "-6", "route", "replace", "default", "via", families[1].gateway.String(), "dev", testenv.PodIfName, "src", "2001:db8:1::2"},
	} {
		if out, err := liar.Run(testenv.Context(t), command[0], command[1:]...); err != nil {
			t.Fatal(out, err)
		}
	}
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
		n.refused(t, liar.Namespace, protocol, at(f.node, 8080), web, byClient)
		n.refused(t, n.SecondOutside, protocol, at(f.secondNode, 8080), web, byClient)
		n.refused(t, a.Namespace, protocol, at(f.node, 8080), web, byClient)
		n.refused(t, web.Namespace, protocol, at(f.node, 8080), web, byClient)
		reachAsOneself(t, a.Namespace, protocol, at(f.pod(web), 80), web.Namespace)
		for _, to := range []netip.Addr{f.node, f.loopbacks()[0]} {
			reach(t, n.node(), protocol, at(to, 8080), web.Namespace)
		}
	})
	if err := web.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}
