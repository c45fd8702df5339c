package scenario

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A node that starts gets all of its pods at once, before the datapath is loaded.
func TestManyPodsAtOnce(t *testing.T) {
	count := 64
	if testing.Short() {
		count = 6 // all of them wait 20 s at most for the first one to load the datapath
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
		for _, f := range families {
			addr := f.pod(pod)
			if !f.podSubnet.Contains(addr) || addr == f.gateway {
				t.Errorf("%s has the %s address %s", pod.Name, f.name, addr)
			}
			if other, taken := owners[addr]; taken {
				t.Errorf("%s and %s have %s", pod.Name, other, addr)
			}
			owners[addr] = pod.Name
		}
	}
	inEachFamily(t, func(t *testing.T, f family) {
		atOnce(t, "ping the gateway", pods, func(pod *testenv.Pod) error {
			return testenv.Ping(testenv.Context(t), pod.Namespace, f.gateway)
		})
	})

	atOnce(t, "DEL", pods, func(pod *testenv.Pod) error { return pod.Del(testenv.Context(t)) })
	n.checkNothingLeft(t)
}

// atOnce does something for every pod, all at a time.
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

// Pods come and go while others work: nothing that one does may disturb another.
func TestPodsComeAndGoUnderTraffic(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		inwards := connect(t, n.Outside, protocol, netip.AddrPort{}, at(f.node, 8080))
		defer inwards.Close()
		outwards := connect(t, web.Namespace, protocol, netip.AddrPort{}, serve(t, n.Outside, protocol, at(f.outside, 0)))
		defer outwards.Close()
		seen := ask(t, outwards, n.Outside)

		done := make(chan struct{})
		go func() {
			defer close(done)
			for i := range 5 {
				pod := n.NewPod(t, fmt.Sprintf("passer-by%d", i))
				if err := pod.Add(testenv.Context(t)); err != nil {
					t.Error(err)
				}
				if err := pod.Del(testenv.Context(t)); err != nil {
					t.Error(err)
				}
			}
		}()
		for asked := 0; ; asked++ {
			select {
			case <-done:
				if asked == 0 {
					t.Error("nothing was asked meanwhile")
				}
				return
			default:
			}
			if peer := ask(t, inwards, web.Namespace); peer != inwards.Local() {
				t.Fatalf("the pod sees %s, want %s", peer, inwards.Local())
			}
			if peer := ask(t, outwards, n.Outside); peer != seen {
				t.Fatalf("the outside sees %s, and saw %s before", peer, seen)
			}
		}
	})
}
