package scenario

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The outside of these stories has no route to pods: what reaches it unmasqueraded
// stays without an answer.

func TestPodReachesOutsideMasqueraded(t *testing.T) { podReachesOutside(t, newNetwork(t)) }

func podReachesOutside(t *testing.T, n *network) {
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		ping(t, pod.Namespace, f.outside)
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.node)
	})
}

// reachAsNode is reach where the server must see an address of the node.
func reachAsNode(t *testing.T, from *testenv.Namespace, protocol string, to netip.AddrPort, want *testenv.Namespace, node netip.Addr) {
	t.Helper()
	if _, seen := reach(t, from, protocol, to, want); seen.Addr() != node {
		t.Errorf("%s asks %s by %s: the server sees %s, want the node %s", from.Name, to, protocol, seen, node)
	}
}

// Pods that use the same port towards the same remote look like one host with one port
// for two connections, unless they get different ports.
func TestPodsWithOnePortReachOneRemote(t *testing.T) {
	n := newNetwork(t)
	var pods []*testenv.Pod
	for _, id := range []string{"a", "b", "c"} {
		pods = append(pods, n.AddPod(t, id, nil))
	}
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		var clients []*testenv.Client
		for _, pod := range pods {
			client := connect(t, pod.Namespace, protocol, at(f.pod(pod), 5000), server)
			defer client.Close()
			clients = append(clients, client)
		}
		// Twice, so that each connection is used while the others exist.
		seen := map[netip.AddrPort]int{}
		for range 2 {
			for i, client := range clients {
				peer := ask(t, client, n.Outside)
				if peer.Addr() != f.node {
					t.Errorf("the server sees %s, want the node %s", peer, f.node)
				}
				if owner, known := seen[peer]; known && owner != i {
					t.Errorf("pods %d and %d look like one connection, %s", owner, i, peer)
				}
				seen[peer] = i
			}
		}
		if len(seen) != len(pods) {
			t.Errorf("%d connections look like %d", len(pods), len(seen))
		}
	})
}

func TestPingsOfManyPodsToOneRemote(t *testing.T) {
	n := newNetwork(t)
	var pods []*testenv.Pod
	for _, id := range []string{"a", "b", "c", "d"} {
		pods = append(pods, n.AddPod(t, id, nil))
	}
	inEachFamily(t, func(t *testing.T, f family) {
		var wg sync.WaitGroup
		for _, pod := range pods {
			wg.Go(func() {
				// iputils takes -e as the identifier: the same for all.
				if err := testenv.Ping(testenv.Context(t), pod.Namespace, f.outside, "-e", "77"); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

func TestManyConnectionsOfOnePod(t *testing.T) {
	const connections = 200

	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		seen := make([]netip.AddrPort, connections)
		var wg sync.WaitGroup
		for i := range connections {
			client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
			defer client.Close()
			wg.Go(func() {
				// The payload tells whether each got its own answer.
				answer, err := client.Ask(testenv.Context(t), fmt.Sprintf("connection %d", i))
				if err != nil {
					t.Errorf("connection %d, from %s: %v", i, client.Local(), err)
				}
				seen[i] = answer.Peer
			})
		}
		wg.Wait()
		distinct := map[netip.AddrPort]bool{}
		for _, peer := range seen {
			if peer.Addr() != f.node {
				t.Errorf("the server sees %s, want the node %s", peer, f.node)
			}
			distinct[peer] = true
		}
		if len(distinct) != connections {
			t.Errorf("%d connections at a time look like %d", connections, len(distinct))
		}
	})
}
