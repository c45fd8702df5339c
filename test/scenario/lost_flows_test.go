package scenario

import (
	"context"
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

// The kernel may evict entries of flows at any time. Live connections continue, and neither end sees a
// reset or an error.

// clearFlows removes all entries of a map of flows and counts them.
func clearFlows(m *ebpf.Map) (removed int, err error) {
	for {
		var key bpf.FlowKey
		if err := m.NextKey(nil, &key); errors.Is(err, ebpf.ErrKeyNotExist) {
			return removed, nil
		} else if err != nil {
			return removed, fmt.Errorf("list keys of %s: %w", m, err)
		}
		if err := m.Delete(&key); err == nil {
			removed++
		} else if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return removed, fmt.Errorf("remove an entry of %s: %w", m, err)
		}
	}
}

// clearFlowsAndCache also voids the forwarding cache, since the packets that it forwards restore no flow.
func clearFlowsAndCache(datapath *loader.Datapath) (removed int, err error) {
	if removed, err = clearFlows(datapath.Flows); err != nil {
		return removed, err
	}
	return removed, maps.With(context.Background(), datapath, func(store *maps.Store) error {
		store.NewGeneration()
		return nil
	})
}

// All flows and the forwarding cache are cleared between two requests.
func TestFlowsLostWhileIdle(t *testing.T) {
	const rounds = 50

	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		clients := map[*testenv.Client]path{}
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		serve(t, n.Outside, protocol, at(f.Outside, 80))
		for _, p := range n.translatedPaths(f, a, web) {
			client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
			defer client.Close()
			clients[client] = p
		}
		seen := map[*testenv.Client]netip.AddrPort{}
		for round := range rounds {
			for client, p := range clients {
				peer := ask(t, client, p.server)
				if round > 0 && peer != seen[client] {
					t.Errorf("%s: server sees %s, want %s as before", p.name, peer, seen[client])
				}
				seen[client] = peer
			}
			n.withDatapath(t, func(datapath *loader.Datapath) {
				if removed, err := clearFlowsAndCache(datapath); err != nil || removed < len(clients) {
					t.Errorf("removed %d flows (%v), want at least %d", removed, err, len(clients))
				}
			})
		}
	})
}

// Flows are cleared, and the server, whose packets cannot restore them, sends first. TCP flows have a backup,
// so its data arrives at once.
func TestFlowsLostBeforeServerSends(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.forEachTranslatedPath(t, a, web, func(t *testing.T, p path) {
		client, server := connectPair(t, p)
		n.withDatapath(t, func(datapath *loader.Datapath) {
			for range 50 {
				if _, err := clearFlows(datapath.Flows); err != nil {
					t.Error(err)
				}
				sendByte(t, server, client)
			}
		})
	})
}

// Flows and their backup are cleared, and the server sends first. Its data has to wait for the client's, and
// must cause no reset meanwhile.
func TestFlowsAndBackupLostBeforeServerSends(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.forEachTranslatedPath(t, a, web, func(t *testing.T, p path) {
		client, server := connectPair(t, p)
		for range 5 {
			clearThenSendFromServer(t, n, client, server)
		}
	})
}

// clearBackup empties flows_backup.
func clearBackup(backup *ebpf.Map) error {
	for i := range backup.MaxEntries() {
		var place bpf.FlowBackup
		if err := backup.Lookup(i, &place); err != nil {
			return err
		}
		if place.Used == 0 {
			continue
		}
		if err := backup.Put(i, bpf.FlowBackup{}); err != nil {
			return err
		}
	}
	return nil
}

// sendByte sends a byte from one end of a connection to the other.
func sendByte(t *testing.T, from, to net.Conn) {
	t.Helper()
	if _, err := from.Write([]byte("x")); err != nil {
		t.Fatalf("send: %v", err)
	}
	if err := readByte(to); err != nil {
		t.Fatalf("receive: %v", err)
	}
}

// readByte reads a byte, for which it waits as long as for everything.
func readByte(from net.Conn) error {
	if err := from.SetReadDeadline(time.Now().Add(testenv.Timeout)); err != nil {
		return err
	}
	_, err := from.Read(make([]byte, 1))
	return err
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
	return client, server
}

// clearThenSendFromServer clears flows and backup, and then sends from the server before the client.
func clearThenSendFromServer(t *testing.T, n *network, client, server net.Conn) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		before := must(maps.DropTotals(datapath))[bpf.ReasonNoFlow].Packets
		if err := clearBackup(datapath.FlowsBackup); err != nil {
			t.Error(err)
		}
		if _, err := clearFlowsAndCache(datapath); err != nil {
			t.Error(err)
		}
		if _, err := server.Write([]byte("x")); err != nil {
			t.Fatalf("send from the server: %v", err)
		}
		testenv.Eventually(t, "the server's packet to be translated or dropped", func() error {
			after := must(maps.DropTotals(datapath))[bpf.ReasonNoFlow].Packets
			flows := must(maps.Flows(datapath))
			if after == before && len(flows) == 0 {
				return errors.New("got no flow and no drop")
			}
			return nil
		})
	})
	if _, err := client.Write([]byte("y")); err != nil {
		t.Fatalf("send from the client: %v", err)
	}
	for name, conn := range map[string]net.Conn{"client": client, "server": server} {
		if err := readByte(conn); err != nil {
			t.Fatalf("receive at the %s: %v", name, err)
		}
	}
}

// Flows are cleared again and again during transfers in both directions.
func TestFlowsLostUnderTraffic(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.translatedPaths(f, a, web) {
			for name, send := range map[string]transfer{
				"upload": upload(sizeOf(32 * mebibyte)), "download": download(sizeOf(32 * mebibyte)),
			} {
				t.Run(p.name+" "+name, func(t *testing.T) {
					times := n.keepClearingFlows(t)
					for range 10 { // a transfer may end before they are cleared once
						send(t, p.client, p.server, p.listen, p.dial)
						if times.Load() >= 3 {
							return
						}
					}
					t.Errorf("flows were cleared %d times during transfers, want at least 3", times.Load())
				})
			}
		}
	})
}

// keepClearingFlows clears the flows periodically until the test ends, and counts how often there were any.
func (n *network) keepClearingFlows(t *testing.T) *atomic.Int64 {
	ctx := t.Context()
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	var times atomic.Int64
	wg.Go(func() {
		n.withDatapath(t, func(datapath *loader.Datapath) {
			ticker := time.NewTicker(5 * time.Millisecond)
			defer ticker.Stop()
			for ctx.Err() == nil {
				removed, err := clearFlowsAndCache(datapath)
				if err != nil {
					t.Error(err)
					return
				}
				if removed > 0 {
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
