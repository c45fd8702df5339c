package scenario

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A pod is deleted while the outside keeps sending to it from new ports. These packets must not recreate
// what DEL has removed.
func TestDelUnderTraffic(t *testing.T) {
	const rounds = 10

	n := newRoutedNetwork(t, podsConflist)
	for i := range rounds {
		pod := n.AddPod(t, "a", nil)
		addr := testenv.Families[i%len(testenv.Families)].Pod(pod)
		stop := n.flood(t, at(addr, 7))
		testenv.Eventually(t, "flows to "+addr.String(), func() error { return n.hasFlows(t) })
		del(t, pod)
		stop()
		n.wantNothingLeft(t)
		if t.Failed() {
			return
		}
	}
}

// flood sends datagrams from the outside, some per socket, until stopped.
func (n *network) flood(t *testing.T, to netip.AddrPort) (stop func()) {
	t.Helper()
	stopped := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stopped:
					return
				default:
				}
				conn, err := n.Outside.Dial(t.Context(), "udp", to)
				if err != nil {
					t.Error(err)
					return
				}
				for range 20 {
					_, _ = conn.Write([]byte("x")) // refused by the pod, and after DEL by the node
				}
				conn.Close()
			}
		})
	}
	return func() { close(stopped); wg.Wait() }
}

func (n *network) hasFlows(t *testing.T) (err error) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		var flows []maps.Flow
		if flows, err = maps.Flows(datapath); err == nil && len(flows) < 100 {
			err = fmt.Errorf("got %d, want 100", len(flows))
		}
	})
	return err
}
