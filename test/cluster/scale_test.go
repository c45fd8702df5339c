package cluster

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/apitest"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var (
	scale       = flag.String("scale", "200", "`NUMBERS` of other nodes in TestScale, such as 1000,5000")
	scaleReport = flag.String("scale-report", "", "`DIR` with the SCALE.md that gets TestScale's figures")
)

// TestScale has an agent learn of many nodes, start again, and lose them all at once, and reports the costs.
func TestScale(t *testing.T) {
	var rows []scaleRow
	for text := range strings.SplitSeq(*scale, ",") {
		number, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("-scale: got %q, want numbers such as 1000,5000", *scale)
		}
		t.Run(text, func(t *testing.T) { rows = append(rows, scaleOf(t, number)...) })
	}
	if *scaleReport != "" && !t.Failed() {
		report(t, *scaleReport, rows)
	}
}

func scaleOf(t *testing.T, number int) []scaleRow {
	c := newIdleCluster(t)
	n := c.nodes[0]
	c.api.Put(n.object())
	n.startAgent()
	n.awaitReady()
	costs := &costs{cluster: c, node: n, number: number}
	var nodes []*corev1.Node
	for i := range number {
		nodes = append(nodes, bigNode(4+i))
	}
	costs.begin()
	c.api.Put(nodes...)
	n.awaitPeers(number)
	costs.add("all join at once")

	n.agent.kill()
	n.startAgent()
	costs.begin()
	n.awaitReady()
	n.awaitPeers(number)
	costs.add("the agent starts again")

	before, _ := c.api.Requests()
	c.api.SetDown(true)
	eventually(t, "a request that fails", func() error {
		if all, _ := c.api.Requests(); len(all) == len(before) {
			return fmt.Errorf("got none")
		}
		return nil
	})
	c.api.SetStreaming(false) // as one may that has just started: all nodes at once
	c.api.Expire()
	costs.begin()
	down, _ := c.api.Requests()
	c.api.SetDown(false)
	eventually(t, "another watch", func() error {
		if c.api.Watches() == 0 {
			return fmt.Errorf("got none")
		}
		return nil
	})
	last := bigNode(4 + number) // is seen after all others
	c.api.Put(last)
	n.awaitPeers(number + 1)
	costs.add("the API server starts again")
	wantList(t, c.api, len(down))
	c.api.SetStreaming(true)

	costs.idle(nodes)
	costs.begin()
	for _, node := range append(nodes, last) {
		c.api.Remove(node.Name)
	}
	n.awaitPeers(0)
	costs.add("all leave at once")
	return costs.rows
}

// wantList wants a list among all requests but the first ones: what costs most.
func wantList(t *testing.T, api *apitest.Server, first int) {
	t.Helper()
	const list = "GET /api/v1/nodes watch= stream="
	if all, _ := api.Requests(); !slices.Contains(all[first:], list) {
		t.Errorf("got requests %q, want %q among them", all[first:], list)
	}
}

// bigNode returns a Node object with what those of real nodes have: 13 KB in protobuf.
func bigNode(number int) *corev1.Node {
	node := nodeObjectOf(number)
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: netip.AddrFrom4([4]byte{203, 0, byte(number >> 8), byte(number)}).String()}}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Unix(1, 0)}}
	node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 5<<10))}}
	for image := range 50 {
		node.Status.Images = append(node.Status.Images, corev1.ContainerImage{
			Names: []string{fmt.Sprintf("registry.example/project/image-%d@sha256:%064d", image, image), fmt.Sprintf("registry.example/project/image-%d:v1.2.3", image)},
		})
	}
	return node
}

// awaitPeers waits until the host has routes of both families to the given number of other nodes, and nothing left to do.
func (n *node) awaitPeers(want int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("%d nodes", want), func() error {
		for _, family := range []string{"-4", "-6"} {
			routes, err := n.Run(testenv.Context(n.t), "ip", family, "route", "show", "type", "unicast", "proto", "235")
			if got := strings.Count(routes, "\n"); err != nil || got != want {
				return fmt.Errorf("got %d routes (%v)", got, err)
			}
		}
		return nil
	})
	n.wantMetrics(fmt.Sprintf(`ebpfnet_peer_prefixes{mode="tunnel"} %d`, 2*want), "ebpfnet_node_ready 1")
}

// scaleRow is what something costs an agent, and how much the API server sends for it.
type scaleRow struct {
	nodes      int
	event      string
	took, cpu  time.Duration
	peak, sent int64 // bytes
}

// costs are those of an agent since begin.
type costs struct {
	*cluster
	node   *node
	number int // of other nodes
	since  time.Time
	cpu    time.Duration
	rows   []scaleRow
}

func (c *costs) begin() {
	c.Helper()
	const peak = "5"

	c.sent.Store(0)
	testenv.Must(c, os.WriteFile(c.node.agent.proc("clear_refs"), []byte(peak), 0))
	c.since, c.cpu = time.Now(), c.node.agent.cpuTime(c.T)
}

func (c *costs) add(event string) {
	c.Helper()
	row := scaleRow{c.number, event, time.Since(c.since), c.node.agent.cpuTime(c.T) - c.cpu, c.node.agent.peak(c.T), c.sent.Load()}
	c.rows = append(c.rows, row)
	c.Logf("%d nodes, %s: %v, CPU %v, RSS at its peak %d KiB, %d KiB from the API server",
		row.nodes, event, row.took.Round(10*time.Millisecond), row.cpu, row.peak>>10, row.sent>>10)
}

// idle has nothing change but heartbeats, as many as kubelets send: for some seconds, or for two minutes if they are reported.
func (c *costs) idle(nodes []*corev1.Node) {
	c.Helper()
	const interval = 5 * time.Minute // of a kubelet

	duration := 5 * time.Second
	if *scaleReport != "" {
		duration = 2 * time.Minute
	}
	c.begin()
	heartbeats := time.NewTicker(interval / time.Duration(len(nodes)))
	defer heartbeats.Stop()
	for i := 0; time.Since(c.since) < duration; i++ {
		<-heartbeats.C // not a wait: the rate
		node := nodes[i%len(nodes)].DeepCopy()
		node.Status.Conditions[0].LastHeartbeatTime = metav1.Now()
		c.api.Put(node)
	}
	c.add(eventIdle)
}

const eventIdle = "heartbeats alone"

func (a *agent) proc(file string) string { return fmt.Sprintf("/proc/%d/%s", a.Process.Pid, file) }

// peak returns the most memory since begin.
func (a *agent) peak(t *testing.T) int64 {
	t.Helper()
	status := testenv.ReadFile(t, a.proc("status"))
	_, rest, _ := strings.Cut(string(status), "VmHWM:")
	kibibytes, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	testenv.Must(t, err)
	return kibibytes << 10
}

// cpuTime adds up that of the agent's threads, of which Go ends none.
func (a *agent) cpuTime(t *testing.T) (total time.Duration) {
	t.Helper()
	threads, err := filepath.Glob(a.proc("task/*/schedstat"))
	testenv.Must(t, err)
	for _, thread := range threads {
		text := testenv.ReadFile(t, thread)
		nanoseconds, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		testenv.Must(t, err)
		total += time.Duration(nanoseconds)
	}
	return total
}

var scalePods = flag.Int("scale-pods", 500, "`NUMBER` of pods in TestPolicyScale; 10000 for what POLICY.md says")

// TestPolicyScale has 500 policies, pods on this node and others, and 50 pods per second that come or go on others. It reports
// the costs, and the time until the datapath has a change.
func TestPolicyScale(t *testing.T) {
	const namespaces, apps, policies, ofNode, rate = 100, 50, 500, 110, 50
	c := newIdleCluster(t, append([]string{"--network-policy"}, clusterCIDRs...)...)
	n := c.nodes[0]
	c.api.Put(n.object())
	n.startAgent()
	n.awaitReady()
	for i := range namespaces {
		name := fmt.Sprint("ns", i)
		c.api.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name}}})
	}
	costs := &costs{cluster: c, node: n}
	costs.begin()
	for i := range policies {
		c.api.Set(scalePolicy(i%namespaces, i/namespaces, apps))
	}
	var policed []int // the namespaces of this node's pods
	for i := range *scalePods {
		pod := scalePod(i, i%namespaces, i/namespaces%apps)
		if i*ofNode/(*scalePods) != (i+1)*ofNode/(*scalePods) {
			pod = scalePod(i, i%namespaces, i/namespaces%(policies/namespaces))
			pod.Spec.NodeName, policed = n.Name, append(policed, i%namespaces)
		}
		c.api.Set(pod)
	}
	n.wantPolicies(len(policed))
	costs.add(fmt.Sprintf("%d policies, %d pods, %d of this node", policies, *scalePods, len(policed)))
	costs.churn(policed, rate)
}

// scalePolicy is about the pods of an app, and admits those of the next one and of a namespace.
func scalePolicy(namespace, app, apps int) *networkingv1.NetworkPolicy {
	policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprint("ns", namespace), Name: fmt.Sprint("p", app)}}
	policy.Spec.PodSelector.MatchLabels = map[string]string{"app": fmt.Sprint(app)}
	policy.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{
		{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": fmt.Sprint((app + 1) % apps)}}},
		{NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"name": fmt.Sprint("ns", namespace)}}},
	}, Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(80))}}}}
	return policy
}

func scalePod(number, namespace, app int) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: fmt.Sprint("ns", namespace), Name: fmt.Sprint("pod", number), UID: types.UID(fmt.Sprint("uid", number)),
		Labels:        map[string]string{"app": fmt.Sprint(app), "pod-template-hash": fmt.Sprint(number)},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 2<<10))}},
	}, Spec: corev1.PodSpec{NodeName: "node-2"}}
	pod.Status.PodIP = netip.AddrFrom4([4]byte{10, byte(100 + number>>16), byte(number >> 8), byte(number)}).String()
	pod.Status.PodIPs = []corev1.PodIP{{IP: pod.Status.PodIP}, {IP: fmt.Sprintf("fd00:1::%x", number+1)}}
	return pod
}

// churn has pods of another node come and go, after so many others.
func (c *costs) churn(namespaces []int, rate int) {
	c.Helper()
	const lifetime = 10
	seconds := 2
	if *scalePods >= 10000 {
		seconds = 60
	}
	var took []time.Duration
	c.node.withDatapath(func(dp *loader.Datapath) error {
		if _, err := maps.PeerClass(dp, netip.IPv6Unspecified()); err != nil { // opens the map
			return err
		}
		last := scalePod(*scalePods+seconds*rate, namespaces[0], 0)
		c.api.Set(last)
		c.until(dp, netip.MustParseAddr(last.Status.PodIP), true) // the agent has read all pods before
		results := make(chan time.Duration)
		c.begin()
		ticker := time.NewTicker(time.Second / time.Duration(rate))
		defer ticker.Stop()
		for i := range seconds * rate {
			<-ticker.C // not a wait: the rate
			number := *scalePods + i/2
			comes := i%2 == 0 || i/2 < lifetime
			if !comes {
				number -= lifetime
			}
			pod := scalePod(number, namespaces[number%len(namespaces)], 0)
			if comes {
				c.api.Set(pod)
			} else {
				c.api.Unset(pod)
			}
			go func() { results <- c.until(dp, netip.MustParseAddr(pod.Status.PodIP), comes) }()
		}
		c.add(fmt.Sprintf("%d pods per second", rate))
		for range seconds * rate {
			took = append(took, <-results)
		}
		return nil
	})
	last := c.rows[len(c.rows)-1]
	slices.Sort(took)
	c.Logf("%.2f %% of a CPU; the datapath has a change after %v (median), %v (p99)", 100*last.cpu.Seconds()/last.took.Seconds(),
		took[len(took)/2], took[len(took)*99/100])
}

// until returns the time until the datapath has a class for an address, or no longer.
func (c *costs) until(dp *loader.Datapath, addr netip.Addr, want bool) time.Duration {
	start, precision := time.Now(), time.NewTicker(2*time.Millisecond) // testenv.Wait is too coarse
	defer precision.Stop()
	for {
		class, err := maps.PeerClass(dp, addr)
		if took := time.Since(start); err == nil && (class != 0) == want {
			return took
		} else if took > testenv.Timeout {
			c.Errorf("the class of %s: got %d (%v), want one: %t", addr, class, err, want)
			return took
		}
		<-precision.C
	}
}
