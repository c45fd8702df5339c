package scenario

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const mbit = 1_000_000

// bandwidth returns the capability's argument.
func bandwidth(keys map[string]int64) map[string]any {
	return map[string]any{"bandwidth": keys}
}

// withBandwidth is withKeys with the bandwidth capability.
func withBandwidth(keys string) string {
	return strings.Replace(withKeys(keys), `{"portMappings": true}`, `{"portMappings": true, "bandwidth": true}`, 1)
}

// rateWindow is how long a rate is measured.
const rateWindow = time.Second / 4

// wantRate wants the flood to settle within 5 % of a rate. It makes several attempts, since the machine
// may be busy, and data that waited for a lost segment arrives in one go. The average until then must not
// exceed the rate.
func wantRate(t *testing.T, flood *testenv.Flood, rate float64) {
	t.Helper()
	const attempts = 80 // one is enough on an idle machine
	window, least := rateWindow, 0.95
	if testing.Short() {
		least = 0.1 // a slow machine may not reach the rate, but must not exceed it
	}
	if rate < 5*mbit {
		window = 3 * time.Second // few packets per second
	}
	flood.Rate(window / 2) // skips the initial burst
	var got, sum float64
	for n := range attempts {
		got = flood.Rate(window)
		sum += got
		if got > rate*least && max(got, sum/float64(n+1)) < rate*1.05 {
			return
		}
	}
	t.Errorf("got %.2f Mbit/s, %.2f on average, want %.2f", got/mbit, sum/attempts/mbit, rate/mbit)
}

var floods = map[string]int{"one connection": 1, "eight connections": 8, "datagrams": 0}

// The rate limits every path to and from a pod.
func TestBandwidth(t *testing.T) {
	const rate = 20 * mbit
	n := newNetworkWith(t, withBandwidth(`"ipMasq": true`))
	args := bandwidth(map[string]int64{"ingressRate": rate, "ingressBurst": 4000, "egressRate": rate, "egressBurst": 4000})
	args["portMappings"] = mapBoth(8080, 80)["portMappings"]
	limited, pod := n.AddPod(t, "limited", args), n.AddPod(t, "a", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.limitedPaths(f, limited, pod) {
			for kind, connections := range floods {
				if connections != 1 && !strings.HasSuffix(p.name, "a pod") {
					continue // the queue is the same
				}
				t.Run(p.name+" by "+kind, func(t *testing.T) {
					flood := testenv.StartFlood(t, p.client, p.server, p.listen, p.dial, connections)
					defer flood.Stop()
					wantRate(t, flood, rate)
				})
			}
		}
	})
	wantCheck(t, limited)
}

// wantFree waits until a flood is faster than the rate. A busy machine may stall it for a while.
func wantFree(t *testing.T, flood *testenv.Flood, rate float64) {
	t.Helper()
	within(t, "a rate without a limit", func() error {
		if got := flood.Rate(rateWindow); got <= rate {
			return fmt.Errorf("got %.2f Mbit/s, want more than %.2f", got/mbit, rate/mbit)
		}
		return nil
	})
}

// A full queue delays neither pings of the limited pod nor the traffic of other pods.
func TestBandwidthUnderLoad(t *testing.T) {
	const rate = 10 * mbit
	n := newNetworkWith(t, withBandwidth(`"ipMasq": true`))
	limited := n.AddPod(t, "limited", bandwidth(map[string]int64{"ingressRate": rate, "egressRate": rate, "ingressBurst": 1 << 31, "egressBurst": 4000}))
	pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		out := testenv.StartFlood(t, limited.Namespace, pod.Namespace, at(f.Pod(pod), 7000), at(f.Pod(pod), 7000), 8)
		in := testenv.StartFlood(t, pod.Namespace, limited.Namespace, at(f.Pod(limited), 7000), at(f.Pod(limited), 7000), 8)
		free := testenv.StartFlood(t, pod.Namespace, other.Namespace, at(f.Pod(other), 7000), at(f.Pod(other), 7000), 1)
		wantRate(t, out, rate)
		wantFree(t, free, 3*rate)
		free.Stop()
		wantFree(t, in, 0)
		replies, err := limited.Run(testenv.Context(t), "ping", "-n", "-c", "10", "-i", "0.05", "-W", "10", f.Pod(pod).String())
		if err != nil || !strings.Contains(replies, " 10 received") {
			t.Errorf("ping with a full queue: %s (%v), want 10 replies", replies, err)
		}
		out.Stop()
		in.Stop()
	})
}

// Rates change while the pod runs, with bursts smaller and larger than a segment.
func TestBandwidthChanges(t *testing.T) {
	n := newNetworkWith(t, withBandwidth(`"ipMasq": true, "egressRate": 300000000, "egressBurst": 0`))
	limited, pod := n.AddPod(t, "limited", nil), n.AddPod(t, "a", nil)
	f := testenv.IPv4
	rates := []float64{10 * mbit, 100 * mbit}
	if *long {
		rates = append(rates, 1*mbit)
	}
	for _, rate := range rates {
		for _, burst := range []int{0, 12000, 1 << 18} {
			set := func(key string, value int) string { return fmt.Sprintf("%s=%d", key, value) }
			n.ctl(t, "set", "pods/limited", set("egressRate", int(rate)), set("egressBurst", burst),
				set("ingressRate", int(rate)), set("ingressBurst", burst))
			wantCheck(t, limited)
			for _, p := range n.limitedPaths(f, limited, pod) {
				if !strings.HasSuffix(p.name, "a pod") {
					continue
				}
				t.Run(fmt.Sprintf("%v Mbit, burst %d, %s", rate/mbit, burst, p.name), func(t *testing.T) {
					flood := testenv.StartFlood(t, p.client, p.server, p.listen, p.dial, 1)
					defer flood.Stop()
					wantRate(t, flood, rate)
				})
			}
		}
	}
	n.ctl(t, "set", "pods/limited", "egressRate=0", "ingressRate=0", "egressBurst=0", "ingressBurst=0")
	out, err := limited.Run(testenv.Context(t), "tc", "qdisc", "show", "dev", testenv.PodIfName)
	if err != nil || strings.Contains(out, "tbf") {
		t.Errorf("queueing disciplines without limits: %s (%v), want no tbf", out, err)
	}
	var coded *cnitypes.Error
	n.ctl(t, "set", "pods/limited", "egressRate=1000000")
	if out, err := limited.Run(testenv.Context(t), "tc", "qdisc", "del", "dev", testenv.PodIfName, "root"); err != nil {
		t.Fatal(out, err)
	}
	if err := limited.Check(testenv.Context(t)); !errors.As(err, &coded) || coded.Code != cnierr.CodeDiffers || !strings.Contains(coded.Msg, "egressRate") {
		t.Errorf("CHECK without the queue: got %v, want code %d and egressRate", err, cnierr.CodeDiffers)
	}
}

// Traffic with unshapedSubnets, here the outside host, is not limited.
func TestUnshapedSubnets(t *testing.T) {
	const rate = 10 * mbit
	n := newNetworkWith(t, withBandwidth(`"ipMasq": true, "ingressRate": 10000000, "egressRate": 10000000, "unshapedSubnets": ["192.0.2.0/28", "2001:db8:1::2/127"]`))
	limited, pod := n.AddPod(t, "limited", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.limitedPaths(f, limited, pod) {
			if strings.Contains(p.name, "host") {
				continue // the queue is the same
			}
			t.Run(p.name, func(t *testing.T) {
				flood := testenv.StartFlood(t, p.client, p.server, p.listen, p.dial, 1)
				defer flood.Stop()
				if !strings.HasSuffix(p.name, "the outside") {
					wantRate(t, flood, rate)
				} else {
					wantFree(t, flood, 3*rate)
				}
			})
		}
	})
	wantCheck(t, limited)
}

// A chained ebpfnet limits another plugin's interface, and DEL removes the limits again.
func TestBandwidthChained(t *testing.T) {
	const rate = 20 * mbit
	for name, first := range firstPlugins {
		t.Run(name, func(t *testing.T) {
			n := newChain(t, first, `{"type": "ebpfnet", "ingressRate": 20000000, "egressRate": 20000000}`)
			limited, pod := n.AddPod(t, "limited", nil), n.AddPod(t, "a", nil)
			for _, p := range n.limitedPaths(testenv.IPv4, limited, pod) {
				if !strings.HasSuffix(p.name, "a pod") {
					continue
				}
				t.Run(p.name, func(t *testing.T) {
					flood := testenv.StartFlood(t, p.client, p.server, p.listen, p.dial, 8)
					defer flood.Stop()
					wantRate(t, flood, rate)
				})
			}
			alone := runtimeWith(t, n, `{"type": "ebpfnet"}`)
			testenv.Must(t, alone.Del(testenv.Context(t), limited.Conf))
			for _, ns := range []*testenv.Namespace{n.node(), limited.Namespace} {
				out, err := ns.Run(testenv.Context(t), "tc", "qdisc", "show")
				if lines := strings.Count(out, "tbf eb:"); err != nil || ns == limited.Namespace && lines > 0 || ns == n.node() && lines > 1 {
					t.Errorf("queueing disciplines of %s after DEL: %s (%v), want no limit of %s", ns.Name, out, err, limited.Name)
				}
			}
		})
	}
}
