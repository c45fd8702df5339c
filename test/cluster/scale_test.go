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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/nodes/apitest"
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
	status, err := os.ReadFile(a.proc("status"))
	testenv.Must(t, err)
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
		text, err := os.ReadFile(thread)
		testenv.Must(t, err)
		nanoseconds, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
		testenv.Must(t, err)
		total += time.Duration(nanoseconds)
	}
	return total
}
