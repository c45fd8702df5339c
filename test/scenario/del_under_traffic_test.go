package scenario

import (
	"errors"
	"net/netip"
	"sync"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A pod goes while the outside still sends to it, from new ports all the time: what
// DEL removes must not come back behind its back.
func TestDelUnderTraffic(t *testing.T) {
	const rounds = 10

	n := newRoutedNetwork(t, podsConflist)
	for i := range rounds {
		pod := n.AddPod(t, "a", nil)
		addr := families[i%len(families)].pod(pod)
		stop := n.flood(t, at(addr, 7))
		testenv.Eventually(t, "flows of "+addr.String(), func() error { return n.hasFlows(t) })
		del(t, pod)
		stop()
		n.checkNothingLeft(t)
		if t.Failed() {
			return
		}
	}
}

// flood sends datagrams from the outside, each few by a new socket, until stopped.
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
					_, _ = conn.Write([]byte("x")) // refused by the pod, and in the end by the node
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
			err = errors.New("not many yet")
		}
	})
	return err
}
