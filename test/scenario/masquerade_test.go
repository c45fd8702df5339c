package scenario

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// In these tests the outside has no route to pods: it could not reply to a packet that is not masqueraded.

func TestMasquerade(t *testing.T) { podReachesOutside(t, newNetwork(t)) }

func podReachesOutside(t *testing.T, n *network) {
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, pod.Namespace, f.Outside)
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.Node)
	})
}

// Pods use the same local port towards the same remote. Each connection needs a masqueraded port of its own.
func TestSameClientPortToOneRemote(t *testing.T) {
	n := newNetwork(t)
	var pods []*testenv.Pod
	for _, id := range []string{"a", "b", "c"} {
		pods = append(pods, n.AddPod(t, id, nil))
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		var clients []*testenv.Client
		for _, pod := range pods {
			client := connect(t, pod.Namespace, protocol, at(f.Pod(pod), 5000), server)
			defer client.Close()
			clients = append(clients, client)
		}
		// Twice, so that each connection is used while all of them are open.
		seen := map[netip.AddrPort]int{}
		for range 2 {
			for i, client := range clients {
				peer := ask(t, client, n.Outside)
				if peer.Addr() != f.Node {
					t.Errorf("server sees %s, want the node %s", peer, f.Node)
				}
				if owner, known := seen[peer]; known && owner != i {
					t.Errorf("server sees connections of pods %d and %d as %s", owner, i, peer)
				}
				seen[peer] = i
			}
		}
		if len(seen) != len(pods) {
			t.Errorf("addresses that the server sees: got %d, want %d", len(seen), len(pods))
		}
	})
}

func TestConcurrentPingsToOneRemote(t *testing.T) {
	n := newNetwork(t)
	var pods []*testenv.Pod
	for _, id := range []string{"a", "b", "c", "d"} {
		pods = append(pods, n.AddPod(t, id, nil))
	}
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		var wg sync.WaitGroup
		for _, pod := range pods {
			wg.Go(func() {
				// All use the same ICMP identifier.
				if err := testenv.Ping(testenv.Context(t), pod.Namespace, f.Outside, "-e", "77"); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	})
}

func TestManyConnections(t *testing.T) {
	const connections = 200

	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		seen := make([]netip.AddrPort, connections)
		var wg sync.WaitGroup
		for i := range connections {
			client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
			defer client.Close()
			wg.Go(func() {
				// Ask compares the payload, which identifies the connection.
				reply, err := client.Ask(testenv.Context(t), fmt.Sprintf("connection %d", i))
				if err != nil {
					t.Errorf("connection %d, from %s: %v", i, client.Local(), err)
				}
				seen[i] = reply.Peer
			})
		}
		wg.Wait()
		distinct := map[netip.AddrPort]bool{}
		for _, peer := range seen {
			if peer.Addr() != f.Node {
				t.Errorf("server sees %s, want the node %s", peer, f.Node)
			}
			distinct[peer] = true
		}
		if len(distinct) != connections {
			t.Errorf("addresses that the server sees: got %d, want %d", len(distinct), connections)
		}
	})
}
