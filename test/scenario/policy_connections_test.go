package scenario

import (
	"context"
	"errors"
	"net/netip"
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
