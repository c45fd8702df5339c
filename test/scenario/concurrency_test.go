package scenario

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A starting node gets all of its pods at once, before the datapath is loaded.
func TestConcurrentPods(t *testing.T) {
	count := 64
	if testing.Short() {
		count = 6 // ADD waits at most 20 s for the one that loads the datapath
	}
	n := newNetwork(t)
	pods := make([]*testenv.Pod, count)
	for i := range pods {
		pods[i] = n.NewPod(t, fmt.Sprintf("pod%d", i))
		pods[i].Conf.CapabilityArgs = mapBoth(uint16(8000+i), 80)
	}

	atOnce(t, "ADD", pods, func(pod *testenv.Pod) error { return pod.Add(testenv.Context(t)) })
	owners := map[netip.Addr]string{}
	for _, pod := range pods {
		for _, f := range testenv.Families {
			addr := f.Pod(pod)
			if !f.PodSubnet.Contains(addr) || addr == f.Gateway {
				t.Errorf("%s: got %s address %s, want one of %s but the gateway", pod.Name, f.Name, addr, f.PodSubnet)
			}
			if other, taken := owners[addr]; taken {
				t.Errorf("%s and %s both got %s", pod.Name, other, addr)
			}
			owners[addr] = pod.Name
		}
	}
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		atOnce(t, "ping the gateway", pods, func(pod *testenv.Pod) error {
			return testenv.Ping(testenv.Context(t), pod.Namespace, f.Gateway)
		})
	})

	atOnce(t, "DEL", pods, func(pod *testenv.Pod) error { return pod.Del(testenv.Context(t)) })
	n.wantNothingLeft(t)
}

// atOnce calls do for all pods concurrently.
func atOnce(t *testing.T, what string, pods []*testenv.Pod, do func(*testenv.Pod) error) {
	t.Helper()
	begin := time.Now()
	var wg sync.WaitGroup
	for _, pod := range pods {
		wg.Go(func() {
			if err := do(pod); err != nil {
				t.Errorf("%s: %s: %v", pod.Name, what, err)
			}
		})
	}
	wg.Wait()
	t.Logf("%s of %d pods at once: %s", what, len(pods), time.Since(begin).Round(time.Millisecond))
}

// Adding and deleting pods does not disturb the connections of another.
func TestPodChurnUnderTraffic(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		inbound := connect(t, n.Outside, protocol, netip.AddrPort{}, at(f.Node, 8080))
		defer inbound.Close()
		outbound := connect(t, web.Namespace, protocol, netip.AddrPort{}, serve(t, n.Outside, protocol, at(f.Outside, 0)))
		defer outbound.Close()
		seen := ask(t, outbound, n.Outside)

		done := make(chan struct{})
		go func() {
			defer close(done)
			for i := range workload(2, 5, 5) {
				pod := n.NewPod(t, fmt.Sprintf("short-lived%d", i))
				testenv.NoError(t, pod.Add(testenv.Context(t)))
				testenv.NoError(t, pod.Del(testenv.Context(t)))
			}
		}()
		for requests := 0; ; requests++ {
			select {
			case <-done:
				if requests == 0 {
					t.Error("no request was sent meanwhile")
				}
				return
			default:
			}
			if peer := ask(t, inbound, web.Namespace); peer != inbound.Local() {
				t.Fatalf("pod sees %s, want %s", peer, inbound.Local())
			}
			if peer := ask(t, outbound, n.Outside); peer != seen {
				t.Fatalf("outside sees %s, want %s as before", peer, seen)
			}
		}
	})
}
