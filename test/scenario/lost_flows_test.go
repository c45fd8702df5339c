package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	testenv.Must(t, err)
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

// Flows are cleared again and again during transfers in both directions.
func TestFlowsLostUnderTraffic(t *testing.T) {
	n := newEstablishedNetwork(t)
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
