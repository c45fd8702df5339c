package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// An attacker is connected to a pod, and continues to send requests. When the pod is isolated, the connection ends at once,
// whether it goes through the stack, is offloaded or has bypassed the stack from the first packet. The pod itself
// can still connect to the attacker.
func TestIsolationEndsConnections(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			victim, attacker, client := n.attack(t, f, protocol)
			n.isolate(t, victim)
			n.wantEnded(t, "request after the isolation", client, victim, reasonPolicy)
			serve(t, attacker.Namespace, protocol, at(f.Pod(attacker), 82))
			reachUntranslated(t, victim.Namespace, protocol, at(f.Pod(attacker), 82), attacker.Namespace)
		})
	})
}

// The victim has closed its listener, as servers do that serve one client, so it looks like a client itself.
func TestIsolationEndsLastConnection(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "established"`))
	n.nft(t, "table inet tracked { chain c { type filter hook prerouting priority 0; ct state new accept; }; }")
	for _, f := range testenv.Families {
		victim, attacker := n.AddPod(t, "victim-"+f.Name, nil), n.AddPod(t, "attacker-"+f.Name, nil)
		listener, err := victim.Listen(testenv.Context(t), at(f.Pod(victim), 80))
		testenv.Must(t, err)
		client := connect(t, attacker.Namespace, "tcp", netip.AddrPort{}, at(f.Pod(victim), 80))
		defer client.Close()
		conn, err := listener.Accept()
		testenv.Must(t, errors.Join(err, listener.Close()))
		defer conn.Close()
		n.isolate(t, victim)
		n.wantEnded(t, "request after the isolation", client, victim, reasonPolicy)
	}
}

// The victim's kernel continues to send what the attacker has not acknowledged. That does not admit the attacker.
func TestIsolationEndsRetransmission(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		for _, f := range testenv.Families {
			t.Run(f.Name, func(t *testing.T) {
				victim, attacker, client := n.attack(t, f, "tcp")
				run(t, attacker, "nft", "table inet deaf {\n chain in {\n type filter hook input priority 0; policy drop;\n }\n }")
				ctx, stop := context.WithCancel(testenv.Context(t))
				done := make(chan error, 1)
				go func() { _, err := client.Ask(ctx, "reply, and I do not hear you"); done <- err }()
				retransmits(t, victim)
				n.isolate(t, victim)
				retransmits(t, victim)
				stop()
				if err := <-done; err == nil {
					t.Fatal("the attacker is not deaf")
				}
				run(t, attacker, "nft", "delete table inet deaf")
				n.wantEnded(t, "request after the isolation", client, victim, reasonPolicy)
			})
		}
	})
}

// attack starts a victim, and an attacker whose client is connected to it. Both have no other connections, so a drop
// for the victim is of this one.
func (n *network) attack(t *testing.T, f testenv.Family, protocol string) (victim, attacker *testenv.Pod, client *testenv.Client) {
	t.Helper()
	victim, attacker = n.AddPod(t, "victim-"+protocol+f.Name, nil), n.AddPod(t, "attacker-"+protocol+f.Name, nil)
	client = connect(t, attacker.Namespace, protocol, netip.AddrPort{}, serve(t, victim.Namespace, protocol, at(f.Pod(victim), 80)))
	t.Cleanup(func() { client.Close() })
	askOften(t, client, victim.Namespace)
	acknowledged(t, victim.Namespace)
	return victim, attacker, client
}

// acknowledged waits until the peers have acknowledged all that the namespaces have sent by TCP, so that no late ACK is the first
// packet that new rules drop.
func acknowledged(t *testing.T, namespaces ...*testenv.Namespace) {
	t.Helper()
	for _, ns := range namespaces {
		testenv.Eventually(t, ns.Name+"'s peers to acknowledge its data", func() error {
			text, err := ns.Run(testenv.Context(t), "cat", "/proc/self/net/tcp", "/proc/self/net/tcp6")
			testenv.Must(t, err)
			for line := range strings.Lines(text) {
				const established = "01"
				if fields := strings.Fields(line); fields[3] == established && !strings.HasPrefix(fields[4], "00000000:") {
					return fmt.Errorf("not acknowledged: %s", line)
				}
			}
			return nil
		})
	}
}

// isolate isolates a pod that runs.
func (n *network) isolate(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	n.ctl(t, "set", "pods/"+pod.Conf.ContainerID, "ingressPolicy=isolated")
}

// wantEnded asks over a connection from or to a pod, and wants that its policy drops that, with the reason, and no reply.
func (n *network) wantEnded(t *testing.T, name string, client *testenv.Client, pod *testenv.Pod, reason maps.Reason) {
	t.Helper()
	err := n.asksInVain(t, name, pod, reason, func(ctx context.Context) error {
		_, err := client.Ask(ctx, "still there?")
		return err
	})
	if !errors.Is(err, context.Canceled) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: got %v, want no response or a RST", name, err)
	}
}

// retransmits waits until a pod has sent a TCP segment again, or has no connection any more: then a segment of it was
// answered by a RST.
func retransmits(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	count := func(name string) int { return kernelCount(t, pod.Namespace, "snmp", "Tcp", name) }
	before := count("RetransSegs")
	testenv.Eventually(t, pod.Name+" to send a segment again", func() error {
		if count("CurrEstab") > 0 && count("RetransSegs") == before {
			return errors.New("not sent again")
		}
		return nil
	})
}

// run runs a command in a pod, and returns its output.
func run(t *testing.T, pod *testenv.Pod, name string, args ...string) string {
	t.Helper()
	out, err := pod.Run(testenv.Context(t), name, args...)
	testenv.Must(t, err)
	return out
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
					t.Fatalf("%s: connection opened %s: reply from %q, %v", step, name, reply.Server, err)
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

// Nobody finds the pod's namespace, where its connections are. The policy is set, and a warning says what that means.
func TestIsolationWithoutNamespace(t *testing.T) {
	n := newNetwork(t)
	pod, a := n.AddPod(t, "pod", nil), n.AddPod(t, "a", nil)
	out, err := n.node().Run(testenv.Context(t), "unshare", "--mount", "sh", "-c", `mount -t tmpfs none /run/netns && exec "$0" "$@"`,
		testenv.Build(t, "./cmd/ebpfnetctl"), "set", "pods/pod", "ingressPolicy=isolated")
	if err != nil || !strings.Contains(out, "warning: ") || !strings.Contains(out, "find the network namespace") {
		t.Errorf("ebpfnetctl set: got %q, %v, want a warning", out, err)
	}
	serve(t, pod.Namespace, "tcp", at(pod.Addr4(), 80))
	n.wantDenied(t, a.Namespace, "tcp", at(pod.Addr4(), 80), pod, reasonPolicy)
}

// A connection that has ended no longer counts as established, by whatever path its packets have gone: flows of ended ones would
// fill the share of a server.
func TestPolicyOfEndedConnections(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true, "policy": {"ingress": [{}], "egress": [{}]}`, func(t *testing.T, conflist string) {
		const number = 50
		n := newNetworkWith(t, conflist)
		client, server := n.AddPod(t, "client", nil), n.AddPod(t, "server", nil)
		established := func() (flows []maps.Flow) {
			n.withDatapath(t, func(datapath *loader.Datapath) {
				for _, flow := range must(maps.Flows(datapath)) {
					if flow.State == maps.FlowState(bpf.FlowEstablished) {
						flows = append(flows, flow)
					}
				}
			})
			return flows
		}
		var open []*testenv.Client
		for _, f := range testenv.Families {
			testenv.Must(t, n.Outside.AddRoute(f.PodSubnet, f.Node))
			inPod := serve(t, server.Namespace, "tcp", at(f.Pod(server), 80))
			for _, path := range []struct {
				from, to *testenv.Namespace
				addr     netip.AddrPort
			}{
				{client.Namespace, server.Namespace, inPod}, {n.Outside, server.Namespace, inPod}, {n.node(), server.Namespace, inPod},
				{client.Namespace, n.Outside, serve(t, n.Outside, "tcp", at(f.Outside, 80))},
				{client.Namespace, n.node(), serve(t, n.node(), "tcp", at(f.Gateway, 80))},
			} {
				for range number {
					reach(t, path.from, "tcp", path.addr, path.to)
				}
				last := connect(t, path.from, "tcp", netip.AddrPort{}, path.addr)
				ask(t, last, path.to)
				open = append(open, last)
			}
		}
		if len(established()) == 0 {
			t.Errorf("%d connections are open, got no established flow", len(open))
		}
		for _, last := range open {
			testenv.Must(t, last.Close())
		}
		testenv.Eventually(t, "the ends of the connections", func() error {
			if flows := established(); len(flows) > 0 {
				return fmt.Errorf("got %v", flows)
			}
			return nil
		})
	})
}
