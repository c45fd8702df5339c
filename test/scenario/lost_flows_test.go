package scenario

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Entries of flows may go at any time: connections that live go on, and no side of them
// is told otherwise.

// loseFlows empties a map of flows, and says how many it had.
func loseFlows(m *ebpf.Map) (lost int, err error) { return loseAll[bpf.FlowKey](m) }

func loseAll[K any](m *ebpf.Map) (lost int, err error) {
	for {
		var key K
		if err := m.NextKey(nil, &key); errors.Is(err, ebpf.ErrKeyNotExist) {
			return lost, nil
		} else if err != nil {
			return lost, fmt.Errorf("find a flow: %w", err)
		}
		if err := m.Delete(&key); err == nil {
			lost++
		} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return lost, fmt.Errorf("delete a flow: %w", err)
		}
	}
}

// path is a way of a connection through the node.
type path struct {
	name           string
	client, server *testenv.Namespace
	listen, dial   netip.AddrPort
}

// paths are all that need entries in flows, to servers on the given port. The pods
// are to be a client, and a server whose port 8080 of the node leads to that port.
func (n *network) paths(f family, a, web *testenv.Pod, port uint16) []path {
	onOutside, onWeb := at(f.outside, port), at(f.pod(web), port)
	return []path{
		{"pod to outside", a.Namespace, n.Outside, onOutside, onOutside},
		{"outside to host port", n.Outside, web.Namespace, onWeb, at(f.node, 8080)},
		{"host to host port", n.node(), web.Namespace, onWeb, at(f.loopbacks()[0], 8080)},
		{"pod to host port", a.Namespace, web.Namespace, onWeb, at(f.node, 8080)},
	}
}

// Between two questions all entries go, and what is known of the short way, which a packet takes
// without making them anew.
func TestFlowsAreLostWhileQuiet(t *testing.T) {
	const rounds = 50

	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		clients := map[*testenv.Client]path{}
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		serve(t, n.Outside, protocol, at(f.outside, 80))
		for _, p := range n.paths(f, a, web, 80) {
			client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
			defer client.Close()
			clients[client] = p
		}
		seen := map[*testenv.Client]netip.AddrPort{}
		for round := range rounds {
			for client, p := range clients {
				peer := ask(t, client, p.server)
				if round > 0 && peer != seen[client] {
					t.Errorf("%s: the server sees %s, and saw %s before", p.name, peer, seen[client])
				}
				seen[client] = peer
			}
			n.withDatapath(t, func(datapath *loader.Datapath) {
				if lost, err := loseFlows(datapath.Flows); err != nil || lost < len(clients) {
					t.Errorf("lost %d flows of %d connections: %v", lost, len(clients), err)
				}
				if _, err := loseAll[bpf.FwdKey](datapath.FwdCache); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// The same when the side that cannot bring the entries back speaks first. TCP connections are
// known a second time, so its word arrives at once.
func TestFlowsAreLostBeforeOtherSideSpeaks(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	inEachFamily(t, func(t *testing.T, f family) {
		for _, p := range n.paths(f, a, web, 80) {
			t.Run(p.name, func(t *testing.T) {
				client, server := connectPair(t, p)
				n.withDatapath(t, func(datapath *loader.Datapath) {
					for range 50 {
						if _, err := loseFlows(datapath.Flows); err != nil {
							t.Error(err)
						}
						say(t, server, client)
					}
				})
			})
		}
	})
}

// Both entries go. The side that cannot bring them back has to wait for the other one, and must
// not be refused meanwhile.
func TestAllIsLostBeforeOtherSideSpeaks(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	inEachFamily(t, func(t *testing.T, f family) {
		for _, p := range n.paths(f, a, web, 80) {
			t.Run(p.name, func(t *testing.T) {
				client, server := connectPair(t, p)
				for range 5 {
					serverSpeaksFirst(t, n, client, server)
				}
			})
		}
	})
}

// say sends a word from one end of a connection to the other.
func say(t *testing.T, from, to net.Conn) {
	t.Helper()
	var word [1]byte
	if _, err := from.Write([]byte("x")); err != nil {
		t.Fatalf("speak: %v", err)
	}
	if _, err := to.Read(word[:]); err != nil {
		t.Fatalf("listen: %v", err)
	}
}

// connectPair opens a TCP connection and returns both ends, which are closed with the test.
func connectPair(t *testing.T, p path) (client, server net.Conn) {
	t.Helper()
	ctx := testenv.Context(t)
	listener, err := p.server.Listen(ctx, p.listen)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if client, err = p.client.Dial(ctx, "tcp", p.dial); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if server, err = listener.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	for _, conn := range []net.Conn{client, server} {
		if err := conn.SetDeadline(time.Now().Add(testenv.Timeout)); err != nil {
			t.Fatal(err)
		}
	}
	return client, server
}

func serverSpeaksFirst(t *testing.T, n *network, client, server net.Conn) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		before := must(maps.DropTotals(datapath))[bpf.ReasonNoFlow].Packets
		for _, m := range []*ebpf.Map{datapath.FlowsBackup, datapath.Flows} {
			if _, err := loseFlows(m); err != nil {
				t.Error(err)
			}
		}
		if _, err := loseAll[bpf.FwdKey](datapath.FwdCache); err != nil {
			t.Error(err)
		}
		if _, err := server.Write([]byte("x")); err != nil {
			t.Fatalf("the server speaks: %v", err)
		}
		testenv.Eventually(t, "the server's word to arrive, or to be kept from a refusal", func() error {
			after := must(maps.DropTotals(datapath))[bpf.ReasonNoFlow].Packets
			flows := must(maps.Flows(datapath))
			if after == before && len(flows) == 0 {
				return errors.New("neither yet")
			}
			return nil
		})
	})
	if _, err := client.Write([]byte("y")); err != nil {
		t.Fatalf("the client speaks: %v", err)
	}
	for name, conn := range map[string]net.Conn{"client": client, "server": server} {
		var word [1]byte
		if _, err := conn.Read(word[:]); err != nil {
			t.Fatalf("the %s listens: %v", name, err)
		}
	}
}

// All entries go again and again while data flows, each way.
func TestFlowsAreLostUnderTraffic(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	inEachFamily(t, func(t *testing.T, f family) {
		for _, p := range n.paths(f, a, web, 80) {
			for name, send := range map[string]transfer{
				"upload": upload(sizeOf(32 * mebibyte)), "download": download(sizeOf(32 * mebibyte)),
			} {
				t.Run(p.name+" "+name, func(t *testing.T) {
					times := n.keepLosingFlows(t)
					for range 10 { // a transfer may be over before they were lost once
						send(t, p.client, p.server, p.listen, p.dial)
						if times.Load() >= 3 {
							return
						}
					}
					t.Errorf("flows were lost %d times only", times.Load())
				})
			}
		}
	})
}

// keepLosingFlows empties the maps all the time until the test ends, and counts how often there
// was something to lose.
func (n *network) keepLosingFlows(t *testing.T) *atomic.Int64 {
	ctx := t.Context()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	var times atomic.Int64
	wg.Go(func() {
		n.withDatapath(t, func(datapath *loader.Datapath) {
			ticker := time.NewTicker(5 * time.Millisecond)
			defer ticker.Stop()
			for ctx.Err() == nil {
				lost, err := loseFlows(datapath.Flows)
				if err == nil { // packets that go the short way bring nothing back
					_, err = loseAll[bpf.FwdKey](datapath.FwdCache)
				}
				if err != nil {
					t.Error(err)
					return
				}
				if lost > 0 {
					times.Add(1)
				}
				select {
				case <-ctx.Done():
				case <-ticker.C:
				}
			}
		})
	})
	return &times
}
