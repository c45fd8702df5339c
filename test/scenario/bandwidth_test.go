package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const mbit = 1_000_000

// bandwidth is what the capability passes.
func bandwidth(keys map[string]int64) map[string]any {
	return map[string]any{"bandwidth": keys}
}

// withBandwidth is a network whose pods can be given limits.
func withBandwidth(keys string) string {
	return strings.Replace(withKeys(keys), `{"portMappings": true}`, `{"portMappings": true, "bandwidth": true}`, 1)
}

// wantRate wants the flood to settle within a twentieth of a rate, in one of some attempts: this
// machine may have other things to do, and data that waited for a lost segment comes at once. What
// has come until then must not be more than the rate.
func wantRate(t *testing.T, flood *testenv.Flood, rate float64) {
	t.Helper()
	const attempts = 40 // of which nearly all are for a machine that has other things to do
	window, least := time.Second/2, 0.95
	if testing.Short() {
		least = 0.1 // a slow machine does not get there, but must not get further
	}
	if rate < 5*mbit {
		window = 3 * time.Second // few packets
	}
	flood.Rate(window / 2) // the beginning, with its burst
	var got, sum float64
	for n := range attempts {
		got = flood.Rate(window)
		sum += got
		if got > rate*least && max(got, sum/float64(n+1)) < rate*1.05 {
			return
		}
	}
	t.Errorf("%.2f Mbit/s arrive in the end, %.2f on average, want %.2f", got/mbit, sum/attempts/mbit, rate/mbit)
}

// limitedWay is a direction in which a pod is limited.
type limitedWay struct {
	name     string
	key      string
	from, to *testenv.Namespace
	listen   netip.AddrPort
	dial     netip.AddrPort
}

func (n *network) limitedWays(f family, limited, pod *testenv.Pod) []limitedWay {
	outside, on := at(f.outside, 7000), at(f.pod(limited), 80)
	other := at(f.pod(pod), 7000)
	return []limitedWay{
		{"to the outside", "egress", limited.Namespace, n.Outside, outside, outside},
		{"to a pod", "egress", limited.Namespace, pod.Namespace, other, other},
		{"to itself by its host port", "egress", limited.Namespace, limited.Namespace, on, at(f.node, 8080)},
		{"from the outside", "ingress", n.Outside, limited.Namespace, on, at(f.node, 8080)},
		{"from a pod", "ingress", pod.Namespace, limited.Namespace, on, on},
		{"from a pod by a host port", "ingress", pod.Namespace, limited.Namespace, on, at(f.node, 8080)},
		{"from the host", "ingress", n.node(), limited.Namespace, on, on},
	}
}

var floods = map[string]int{"one connection": 1, "eight connections": 8, "datagrams": 0}

// Each way to and from a limited pod holds its rate, and the other direction is as fast as ever.
func TestBandwidth(t *testing.T) {
	const rate = 20 * mbit
	n := newNetworkOf(t, withBandwidth(`"ipMasq": true`))
	args := bandwidth(map[string]int64{"ingressRate": rate, "ingressBurst": 4000, "egressRate": rate, "egressBurst": 4000})
	args["portMappings"] = mapBoth(8080, 80)["portMappings"]
	limited, pod := n.AddPod(t, "limited", args), n.AddPod(t, "a", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		for _, way := range n.limitedWays(f, limited, pod) {
			for kind, connections := range floods {
				if connections != 1 && (strings.Contains(way.name, "host") || strings.Contains(way.name, "itself")) {
					continue // the queue is the same
				}
				t.Run(way.name+" by "+kind, func(t *testing.T) {
					flood := testenv.StartFlood(t, way.from, way.to, way.listen, way.dial, connections)
					defer flood.Stop()
					wantRate(t, flood, rate)
				})
			}
		}
	})
	if err := limited.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

// What others ask of a limited pod whose way is full is answered soon, and other pods do not notice.
func TestBandwidthUnderLoad(t *testing.T) {
	const rate = 10 * mbit
	n := newNetworkOf(t, withBandwidth(`"ipMasq": true`))
	limited := n.AddPod(t, "limited", bandwidth(map[string]int64{"ingressRate": rate, "egressRate": rate, "ingressBurst": 1 << 31, "egressBurst": 4000}))
	pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		out := testenv.StartFlood(t, limited.Namespace, pod.Namespace, at(f.pod(pod), 7000), at(f.pod(pod), 7000), 8)
		in := testenv.StartFlood(t, pod.Namespace, limited.Namespace, at(f.pod(limited), 7000), at(f.pod(limited), 7000), 8)
		free := testenv.StartFlood(t, pod.Namespace, other.Namespace, at(f.pod(other), 7000), at(f.pod(other), 7000), 1)
		wantRate(t, out, rate)
		if got := free.Rate(time.Second); got < 3*rate {
			t.Errorf("%.2f Mbit/s arrive at another pod", got/mbit)
		}
		free.Stop()
		if in.Rate(time.Second) == 0 {
			t.Error("nothing arrives at the limited pod")
		}
		said, err := limited.Run(testenv.Context(t), "ping", "-n", "-c", "20", "-i", "0.05", "-W", "1", f.pod(pod).String())
		if err != nil || !strings.Contains(said, " 20 received") {
			t.Errorf("pings beside a full queue: %s (%v)", said, err)
		}
		out.Stop()
		in.Stop()
	})
}

// Rates are set while the pod lives, with bursts smaller than a segment and larger ones.
func TestBandwidthChanges(t *testing.T) {
	n := newNetworkOf(t, withBandwidth(`"ipMasq": true, "egressRate": 300000000, "egressBurst": 0`))
	limited, pod := n.AddPod(t, "limited", nil), n.AddPod(t, "a", nil)
	f := families[0]
	for _, rate := range []float64{1 * mbit, 10 * mbit, 100 * mbit} {
		for _, burst := range []int{0, 12000, 1 << 18} {
			set := func(key string, value int) string { return fmt.Sprintf("%s=%d", key, value) }
			n.ctl(t, "set", "pods/limited", set("egressRate", int(rate)), set("egressBurst", burst),
				set("ingressRate", int(rate)), set("ingressBurst", burst))
			if err := limited.Check(testenv.Context(t)); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			for _, way := range n.limitedWays(f, limited, pod) {
				if !strings.HasSuffix(way.name, "a pod") {
					continue
				}
				t.Run(fmt.Sprintf("%v Mbit, burst %d, %s", rate/mbit, burst, way.name), func(t *testing.T) {
					flood := testenv.StartFlood(t, way.from, way.to, way.listen, way.dial, 1)
					defer flood.Stop()
					wantRate(t, flood, rate)
				})
			}
		}
	}
	n.ctl(t, "set", "pods/limited", "egressRate=0", "ingressRate=0", "egressBurst=0", "ingressBurst=0")
	out, err := limited.Run(testenv.Context(t), "tc", "qdisc", "show", "dev", testenv.PodIfName)
	if err != nil || strings.Contains(out, "tbf") {
		t.Errorf("a queue is left: %s (%v)", out, err)
	}
	var coded *cnitypes.Error
	n.ctl(t, "set", "pods/limited", "egressRate=1000000")
	if out, err := limited.Run(testenv.Context(t), "tc", "qdisc", "del", "dev", testenv.PodIfName, "root"); err != nil {
		t.Fatal(out, err)
	}
	if err := limited.Check(testenv.Context(t)); !errors.As(err, &coded) || coded.Code != cnierr.CodeDiffers || !strings.Contains(coded.Msg, "egressRate") {
		t.Errorf("CHECK without the queue: %v", err)
	}
}

// Some networks do not count.
func TestUnshapedSubnets(t *testing.T) {
	const rate = 10 * mbit
	n := newNetworkOf(t, withBandwidth(`"ipMasq": true, "ingressRate": 10000000, "egressRate": 10000000, "unshapedSubnets": ["192.0.2.0/28", "2001:db8:1::2/127"]`))
	limited, pod := n.AddPod(t, "limited", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		for _, way := range n.limitedWays(f, limited, pod) {
			t.Run(way.name, func(t *testing.T) {
				flood := testenv.StartFlood(t, way.from, way.to, way.listen, way.dial, 1)
				defer flood.Stop()
				if !strings.HasSuffix(way.name, "the outside") {
					wantRate(t, flood, rate)
				} else if got := flood.Rate(time.Second); got < 3*rate {
					t.Errorf("%.2f Mbit/s arrive of what is not limited", got/mbit)
				}
			})
		}
	})
	if err := limited.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

// DEL takes the limits off an interface that is another plugin's.
func TestBandwidthBehindOthers(t *testing.T) {
	const rate = 20 * mbit
	for name, first := range firstPlugins {
		t.Run(name, func(t *testing.T) {
			n := chainOf(t, first, `{"type": "ebpfnet", "ingressRate": 20000000, "egressRate": 20000000}`)
			limited, pod := n.AddPod(t, "limited", nil), n.AddPod(t, "a", nil)
			for _, way := range n.limitedWays(families[0], limited, pod) {
				if !strings.HasSuffix(way.name, "a pod") {
					continue
				}
				t.Run(way.name, func(t *testing.T) {
					flood := testenv.StartFlood(t, way.from, way.to, way.listen, way.dial, 8)
					defer flood.Stop()
					wantRate(t, flood, rate)
				})
			}
			alone := chainOf2(t, n, `{"type": "ebpfnet"}`)
			if err := alone.Del(testenv.Context(t), limited.Conf); err != nil {
				t.Fatal(err)
			}
			for _, ns := range []*testenv.Namespace{n.node(), limited.Namespace} {
				out, err := ns.Run(testenv.Context(t), "tc", "qdisc", "show")
				if lines := strings.Count(out, "tbf eb:"); err != nil || ns == limited.Namespace && lines > 0 || ns == n.node() && lines > 1 {
					t.Errorf("queues are left in %s: %s (%v)", ns.Name, out, err)
				}
			}
		})
	}
}
