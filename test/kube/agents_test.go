package kube

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestAgents runs agents with a real API server, and the rights of the manifests alone: Node objects come and go, etcd
// forgets the past, and the API server ends and starts again.
func TestAgents(t *testing.T) {
	c := newCluster(t)
	c.startAPI()
	c.applyAgent()
	for i, n := range c.nodes {
		if _, err := c.apply(n.object(i+1), "create", "--filename=-"); err != nil {
			t.Fatal(err)
		}
	}
	kubeconfig := c.creds.kubeconfig(c.must("create", "token", "ebpfnet-node", "--namespace=kube-system", "--duration=1h"))
	agents := map[*node]*daemon{}
	for _, n := range c.nodes {
		agents[n] = n.startAgent(kubeconfig)
	}
	first, third := c.nodes[0], c.nodes[2]
	pods := map[*node][]netip.Addr{}
	for _, n := range c.nodes {
		n.awaitAgent()
		pods[n] = n.addPod("pod")
	}
	wantReach := func(when string) {
		t.Helper()
		for _, from := range c.nodes {
			for _, to := range c.nodes {
				for _, addr := range pods[to] {
					c.eventually(fmt.Sprintf("%s: pod of %s to reach %s of %s", when, from.Name, addr, to.Name), func() error {
						output, err := from.command(testenv.Context(t), "ip", "netns", "exec", "pod", "ping", "-c1", "-W2", addr.String()).CombinedOutput()
						if err != nil {
							err = fmt.Errorf("%w: %s", err, output)
						}
						return err
					})
				}
			}
		}
	}
	wantReach("first")

	agents[first].signal(unix.SIGSTOP)
	c.must("delete", "node", third.Name)
	c.restartAPI() // remembers no changes for watches of older revisions
	agents[first].signal(unix.SIGCONT)
	first.awaitRoute("a node removed while the agent stood still", 3, noRoute)
	if _, err := c.apply(third.object(3), "create", "--filename=-"); err != nil {
		t.Fatal(err)
	}
	first.awaitRoute("a node added after the API server's restart", 3, byTunnel)
	wantReach("after the API server's restart")

	agents[first].kill()
	c.must("delete", "node", third.Name)
	agents[first] = first.startAgent(kubeconfig)
	first.awaitRoute("a node removed while the agent was down", 3, noRoute)
	for _, verb := range []string{"create", "update", "patch", "delete"} {
		if answer, err := c.kubectl("auth", "can-i", verb, "nodes", "--as=system:serviceaccount:kube-system:ebpfnet-node"); err == nil {
			t.Errorf("may agents %s nodes: got %s, want no", verb, answer)
		}
	}
}

// awaitAgent waits until the agent has written the conflist.
func (n *node) awaitAgent() {
	n.t.Helper()
	n.control.eventually("agent of "+n.Name, func() error {
		_, err := os.Stat(n.path("/etc/cni/net.d/10-ebpfnet.conflist"))
		return err
	})
}

// awaitRoute waits until the node has such a route to the pods of a node without a kubelet.
func (n *node) awaitRoute(what string, number int, want way) {
	n.t.Helper()
	n.t.Log(what)
	for _, f := range families {
		n.awaitPrefix(fmt.Sprintf(f.nodePods, number), want)
	}
}

// way is how a node reaches the pods of another: what a route has, as ip shows it.
type way string

const (
	noRoute  way = ""
	byTunnel way = " encap ip"
	direct   way = " via "
)

// awaitPrefix waits until the node has such a route to a prefix.
func (n *node) awaitPrefix(prefix string, want way) {
	n.t.Helper()
	version := "-4"
	if strings.Contains(prefix, ":") {
		version = "-6"
	}
	n.control.eventually(fmt.Sprintf("route of %s to %s", n.Name, prefix), func() error {
		got, err := n.command(testenv.Context(n.t), "ip", version, "route", "show", prefix).Output()
		if err == nil && (!strings.Contains(string(got), string(want)) || want == noRoute && len(got) > 0) {
			err = fmt.Errorf("got %q, want %q", got, want)
		}
		return err
	})
}

// restartAPI ends the API server and starts it again.
func (c *cluster) restartAPI() {
	c.t.Helper()
	c.daemons["kube-apiserver"].kill()
	c.startAPIServer()
}
