package scenario

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// An attacker is connected to a pod, and goes on asking. When the pod is isolated, the connection ends at once,
// whether it goes through the stack, is offloaded or has bypassed the stack from the first packet. The pod itself
// can still connect to the attacker.
func TestIsolationEndsConnections(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		victim, attacker := n.AddPod(t, "victim", nil), n.AddPod(t, "attacker", nil)
		clients := map[string]*testenv.Client{}
		for _, f := range testenv.Families {
			for _, protocol := range []string{"tcp", "udp"} {
				client := connect(t, attacker.Namespace, protocol, netip.AddrPort{}, serve(t, victim.Namespace, protocol, at(f.Pod(victim), 80)))
				defer client.Close()
				for range 20 { // enough for the offload and the forwarding cache
					ask(t, client, victim.Namespace)
				}
				clients[protocol+" "+f.Name] = client
			}
		}
		n.ctl(t, "set", "pods/victim", "ingressPolicy=isolated")
		before := n.dropsOf(t, victim)[reasonPolicy]
		for name, client := range clients {
			ctx, stop := context.WithCancel(testenv.Context(t))
			done := make(chan error, 1)
			go func() { _, err := client.Ask(ctx, "still there?"); done <- err }()
			testenv.Eventually(t, "a drop by "+name, func() error {
				now := n.dropsOf(t, victim)[reasonPolicy]
				if now == before {
					return errors.New("no more drops")
				}
				before = now
				return nil
			})
			stop()
			if err := <-done; err == nil {
				t.Errorf("%s: the pod replied", name)
			}
		}
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			serve(t, attacker.Namespace, protocol, at(f.Pod(attacker), 82))
			reachUntranslated(t, victim.Namespace, protocol, at(f.Pod(attacker), 82), attacker.Namespace)
		})
	})
}

// The pod itself has opened connections: to another pod, its host port and its service. They go on whenever its policy
// changes, and the server still cannot connect to it.
func TestIsolationKeepsOwnConnections(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		pod, server := n.AddPod(t, "pod", nil), n.AddPod(t, "server", mapBoth(8080, 80))
		n.nft(t, serviceRules(server))
		clients := map[string]*testenv.Client{}
		open := func(when string) {
			for _, f := range testenv.Families {
				for _, protocol := range []string{"tcp", "udp"} {
					addrs := map[string]netip.AddrPort{"its address": at(f.Pod(server), 80), "its host port": at(f.Node, 8080)}
					if !strings.Contains(conflist, `"always"`) { // which bypasses the rules of services
						addrs["its service"] = at(serviceOf(f), 80)
					}
					for name, to := range addrs {
						client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, to)
						t.Cleanup(func() { client.Close() })
						clients[when+" by "+protocol+" "+f.Name+" to "+name] = client
					}
				}
			}
		}
		wantAll := func(step string) {
			for name, client := range clients {
				if reply, err := client.Ask(testenv.Context(t), "hello"); err != nil || reply.Server != server.Name {
					t.Errorf("%s: connection opened %s: reply from %q, %v", step, name, reply.Server, err)
				}
			}
		}
		for _, f := range testenv.Families {
			for _, protocol := range []string{"tcp", "udp"} {
				serve(t, server.Namespace, protocol, at(f.Pod(server), 80))
				serve(t, pod.Namespace, protocol, at(f.Pod(pod), 81))
			}
		}
		for _, policy := range []string{"open", "isolated", "open", "same-network", "isolated"} {
			n.ctl(t, "set", "pods/pod", "ingressPolicy="+policy)
			wantAll(policy)
			open("when " + policy)
			wantAll("then")
		}
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			n.wantDenied(t, server.Namespace, protocol, at(f.Pod(pod), 81), pod, reasonPolicy)
		})
	})
}
