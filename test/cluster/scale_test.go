package cluster

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var scale = flag.Int("scale", 200, "other nodes in TestScale, which logs what they cost an agent")

// TestScale has an agent learn of many nodes, start again, and lose them all at once.
func TestScale(t *testing.T) {
	c := newIdleCluster(t)
	n := c.nodes[0]
	c.api.Put(n.object())
	n.startAgent()
	n.awaitReady()
	costs := &costs{cluster: c, node: n, since: time.Now()}
	costs.log("one node")

	var nodes []*corev1.Node
	for number := 4; number < 4+*scale; number++ {
		nodes = append(nodes, bigNode(number))
	}
	costs.begin()
	c.api.Put(nodes...)
	n.awaitPeers(*scale)
	costs.log(fmt.Sprintf("%d nodes join at once", *scale))

	n.agent.kill()
	costs.begin()
	n.startAgent()
	n.awaitReady()
	n.awaitPeers(*scale)
	costs.log("the agent starts again")

	costs.begin()
	c.api.Expire()
	eventually(t, "another watch", func() error {
		if c.api.Watches() == 0 {
			return fmt.Errorf("got none")
		}
		return nil
	})
	for _, node := range nodes {
		node = node.DeepCopy()
		node.Status.Conditions[0].LastHeartbeatTime = metav1.Unix(2, 0)
		c.api.Put(node)
	}
	last := bigNode(4 + *scale) // is seen after all heartbeats
	c.api.Put(last)
	n.awaitPeers(*scale + 1)
	costs.log("all listed again, and a heartbeat of each")

	costs.begin()
	for _, node := range append(nodes, last) {
		c.api.Remove(node.Name)
	}
	n.awaitPeers(0)
	costs.log("all gone")
}

// bigNode returns a Node object with what those of real nodes have: 16 KB.
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

// awaitPeers waits until the host has routes of both families to so many other nodes, and no more to do.
func (n *node) awaitPeers(want int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("%d nodes", want), func() error {
		for _, family := range []string{"-4", "-6"} {
			routes, err := n.Run(testenv.Context(n.t), "ip", family, "route", "show", "proto", "235")
			if got := strings.Count(routes, "\n"); err != nil || got != want {
				return fmt.Errorf("got %d routes (%w)", got, err)
			}
		}
		return nil
	})
	n.wantMetrics(fmt.Sprintf(`ebpfnet_peer_prefixes{mode="tunnel"} %d`, 2*want), "ebpfnet_node_ready 1")
}

// costs are those of an agent and of the API server since begin.
type costs struct {
	*cluster
	node  *node
	since time.Time
	cpu   time.Duration
}

func (c *costs) begin() {
	c.Helper()
	c.sent.Store(0)
	c.since, c.cpu = time.Now(), 0
	if c.node.agent.isRunning() {
		c.cpu = cpuTime(c.cluster, c.node.agent.Process.Pid)
	}
}

// log tells them, and the agent's memory.
func (c *costs) log(when string) {
	c.Helper()
	took := time.Since(c.since)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.node.agent.Process.Pid))
	if err != nil {
		c.Fatal(err)
	}
	memory := map[string]string{}
	for line := range strings.Lines(string(status)) {
		if key, value, found := strings.Cut(line, ":"); found {
			memory[key] = strings.TrimSpace(value)
		}
	}
	c.Logf("%s: %v, CPU %v, RSS %s, at its peak %s, %d KiB from the API server",
		when, took.Round(10*time.Millisecond), cpuTime(c.cluster, c.node.agent.Process.Pid)-c.cpu, memory["VmRSS"], memory["VmHWM"], c.sent.Load()>>10)
}

// cpuTime reads fields 14 and 15 of /proc/PID/stat.
func cpuTime(c *cluster, pid int) time.Duration {
	c.Helper()
	const tick = 10 * time.Millisecond // USER_HZ

	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		c.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * tick
}
