package kube

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestKubernetes starts all of Kubernetes, installs the agent from its manifests, deploys a web service on all nodes, and
// reaches it in all ways while agents and nodes come and go.
func TestKubernetes(t *testing.T) {
	c := newCluster(t)
	c.startKubernetes()
	for _, step := range []struct {
		name string
		run  func(*cluster)
	}{
		{"not ready without an agent", (*cluster).testWithoutAgent},
		{"ready with it", (*cluster).testReady},
		{"ways to other nodes", (*cluster).testRoutes},
		{"pod to pod", (*cluster).testPodToPod},
		{"service", (*cluster).testService},
		{"service past the stack", (*cluster).testServiceOffload},
		{"node port", (*cluster).testNodePort},
		{"node port past the stack", (*cluster).testNodePortOffload},
		{"host port", (*cluster).testHostPort},
		{"probes", (*cluster).testProbes},
		{"exec and port-forward", (*cluster).testExec},
		{"containerd and kubelet killed under traffic", (*cluster).testRestart},
		{"agents deleted under traffic", (*cluster).testAgentsDeleted},
		{"not ready after a boot without an agent", (*cluster).testUnsynced},
		{"node removed and back", (*cluster).testNodeRemoved},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			c.use(t)
			step.run(c)
		}) {
			c.use(t)
			c.describe()
			return
		}
	}
}

// use makes a test the one that fails when something of the cluster does.
func (c *cluster) use(t *testing.T) {
	c.t = t
	for _, n := range c.nodes {
		n.t = t
	}
}

// startKubernetes starts everything but the agent. All nodes have the images.
func (c *cluster) startKubernetes(more ...image) {
	c.t.Helper()
	manager, scheduler := c.userFile("system:kube-controller-manager", ""), c.userFile("system:kube-scheduler", "")
	c.startAPI()
	c.startControllers(manager, scheduler)
	archive, err := layout(append(images(c.t), more...))
	testenv.Must(c.t, err)
	for _, n := range c.nodes {
		n.startContainerd()
		n.importImages(archive)
		n.startKubelet()
		n.startProxy()
	}
}

// condition returns the status of a node's condition Ready and its message.
func (c *cluster) condition(node string) (ready bool, message string, err error) {
	output, err := c.kubectl("get", "node", node, `--output=jsonpath={range .status.conditions[?(@.type=="Ready")]}{.status} {.message}{end}`)
	status, message, _ := strings.Cut(output, " ")
	return status == "True", message, err
}

// awaitReady waits until a node is ready, or not ready for a reason.
func (c *cluster) awaitReady(node, reason string) {
	c.t.Helper()
	c.eventually("condition of "+node, func() error {
		ready, message, err := c.condition(node)
		if err == nil && (ready != (reason == "") || !strings.Contains(message, reason)) {
			err = fmt.Errorf("got ready: %t, %q; want %q", ready, message, reason)
		}
		return err
	})
}

func (c *cluster) testWithoutAgent() {
	for _, n := range c.nodes {
		c.awaitReady(n.Name, "NetworkPluginNotReady")
	}
}

func (c *cluster) testReady() {
	c.startAgents()
	c.must("apply", "--filename=manifests/web.yaml")
	c.rollout("default", "web")
}

// startAgents installs the agent and waits until all nodes are ready.
func (c *cluster) startAgents() {
	c.t.Helper()
	c.applyAgent()
	for _, n := range c.nodes {
		c.awaitReady(n.Name, "")
	}
	c.rollout("kube-system", "ebpfnet-node")
}

// applyAgent installs the agent's manifests with this cluster's addresses.
func (c *cluster) applyAgent() {
	c.t.Helper()
	if _, err := c.apply([]byte(c.agentManifests()), "apply", "--filename=-"); err != nil {
		c.t.Fatal(err)
	}
}

// agentManifests are the agent's, with this cluster's addresses.
func (c *cluster) agentManifests() string {
	c.t.Helper()
	return strings.NewReplacer("$MODE", *agentMode, "$API", apiURL(), "$PODS", podPrefixes()).Replace(c.must("kustomize", "manifests"))
}

// testRoutes wants the first node to reach others by the tunnel or, in mode auto, directly if they are on its link.
func (c *cluster) testRoutes() {
	for i, to := range c.nodes[1:] {
		want := byTunnel
		if *agentMode == "auto" && i == 0 {
			want = direct
		}
		for prefix := range strings.FieldsSeq(c.must("get", "node", to.Name, "--output=jsonpath={.spec.podCIDRs[*]}")) {
			c.nodes[0].awaitPrefix(prefix, want)
		}
	}
}

// rollout waits until a DaemonSet's pods are ready on all nodes.
func (c *cluster) rollout(namespace, name string) {
	c.t.Helper()
	c.eventually("pods of "+name, func() error {
		_, err := c.kubectl("rollout", "status", "daemonset/"+name, "--namespace="+namespace, "--timeout=10s")
		return err
	})
}

// pod is a pod of the web service.
type pod struct {
	name  string
	node  *node
	addrs []netip.Addr
}

// web returns the pods of the web service.
func (c *cluster) web() []pod {
	c.t.Helper()
	return c.podsOf("web")
}

// podsOf waits until there is one pod of an app on each node, which is ready, and returns them in the order of the nodes.
func (c *cluster) podsOf(app string) (pods []pod) {
	c.t.Helper()
	c.eventually("a pod of "+app+" on each node", func() error {
		pods = nil
		for _, n := range c.nodes {
			line, err := c.kubectl("get", "pods", "--selector=app="+app, "--field-selector=status.phase=Running,spec.nodeName="+n.Name,
				`--output=jsonpath={range .items[*]}{.metadata.name} {.metadata.deletionTimestamp} {.status.conditions[?(@.type=="Ready")].status} `+
					"{.status.podIPs[*].ip}{end}")
			fields := strings.Fields(line)
			if err != nil || len(fields) != 2+len(families) || fields[1] != "True" {
				return fmt.Errorf("%s: got %q (%v), want a name, True and %d addresses", n.Name, line, err, len(families))
			}
			p := pod{name: fields[0], node: n}
			for _, field := range fields[2:] {
				p.addrs = append(p.addrs, netip.MustParseAddr(field))
			}
			pods = append(pods, p)
		}
		return nil
	})
	return pods
}

const (
	podPort  = 8080
	nodePort = 30080
	hostPort = 8081
)

// get has a host ask a web server.
func get(t testenv.TB, from *testenv.Namespace, to netip.AddrPort, path string) (string, error) {
	return testenv.HTTPGet(testenv.Context(t), from, fmt.Sprintf("http://%s/%s", to, path))
}

// ask has a pod ask a server over HTTP or UDP, and returns the reply.
func (p pod) ask(to netip.AddrPort, protocol, request string) (string, error) {
	query := url.Values{"host": {to.Addr().String()}, "port": {fmt.Sprint(to.Port())}, "protocol": {protocol}, "request": {request}, "tries": {"1"}}
	body, err := get(p.node.t, p.node.Namespace, netip.AddrPortFrom(p.addrs[0], podPort), "dial?"+query.Encode())
	if err != nil {
		return "", err
	}
	var reply struct{ Responses, Errors []string }
	if err := json.Unmarshal([]byte(body), &reply); err != nil {
		return "", fmt.Errorf("%w: %s", err, body)
	}
	if len(reply.Responses) != 1 {
		return "", fmt.Errorf("%s (%s) got no reply from %s: %q", p.name, p.node.Name, to, reply.Errors)
	}
	return reply.Responses[0], nil
}

// testPodToPod wants each pod to reach each under its own address.
func (c *cluster) testPodToPod() {
	pods := c.web()
	for _, from := range pods {
		for _, to := range pods {
			for i, addr := range to.addrs {
				got, err := from.ask(netip.AddrPortFrom(addr, podPort), "http", "clientip")
				client, _ := netip.ParseAddrPort(got)
				if err != nil || client.Addr() != from.addrs[i] {
					c.t.Errorf("%s to %s at %s: got %q (%v), want to be seen as %s", from.node.Name, to.node.Name, addr, got, err, from.addrs[i])
				}
			}
		}
	}
}

// serviceAddrs are those of the web service.
func (c *cluster) serviceAddrs() (addrs []netip.Addr) {
	for field := range strings.FieldsSeq(c.must("get", "service", "web", "--output=jsonpath={.spec.clusterIPs[*]}")) {
		addrs = append(addrs, netip.MustParseAddr(field))
	}
	if len(addrs) != len(families) {
		c.t.Fatalf("service: got addresses %v, want %d", addrs, len(families))
	}
	return addrs
}

// testService wants each pod to reach the pods of all nodes by the service's addresses.
func (c *cluster) testService() {
	pods := c.web()
	for _, from := range pods {
		for _, addr := range c.serviceAddrs() {
			c.awaitAll(fmt.Sprintf("service at %s from %s", addr, from.node.Name), pods, func() (string, error) {
				return from.ask(netip.AddrPortFrom(addr, 80), "http", "hostname")
			})
		}
	}
}

// testNodePort wants a host outside to reach the pods of all nodes by each node's port.
func (c *cluster) testNodePort() {
	pods := c.web()
	for _, n := range c.nodes {
		for _, addr := range n.addrs {
			c.awaitAll(fmt.Sprintf("node port at %s", addr), pods, func() (string, error) {
				return get(c.t, c.router, netip.AddrPortFrom(addr, nodePort), "hostname")
			})
		}
	}
}

// awaitAll asks until each of the pods has replied.
func (c *cluster) awaitAll(what string, pods []pod, ask func() (string, error)) {
	c.t.Helper()
	missing := map[string]bool{}
	for _, p := range pods {
		missing[p.name] = true
	}
	c.eventually(what, func() error {
		got, err := ask()
		delete(missing, got)
		if err == nil && len(missing) > 0 {
			err = fmt.Errorf("no reply of %v yet", missing)
		}
		return err
	})
}

// testHostPort wants a host outside to reach each node's own pod, which sees the client's address; and the node itself, on
// loopback.
func (c *cluster) testHostPort() {
	var router []netip.Addr
	for link := range links {
		for _, f := range families {
			router = append(router, f.host(link, routerNumber).Addr())
		}
	}
	for _, p := range c.web() {
		for _, addr := range p.node.addrs {
			to := netip.AddrPortFrom(addr, hostPort)
			if got, err := get(c.t, c.router, to, "hostname"); err != nil || got != p.name {
				c.t.Errorf("host port at %s: got %q (%v), want %s", to, got, err, p.name)
			}
			got, err := get(c.t, c.router, to, "clientip")
			client, _ := netip.ParseAddrPort(got)
			if err != nil || !slices.Contains(router, client.Addr()) {
				c.t.Errorf("host port at %s: got client %q (%v), want one of %v", to, got, err, router)
			}
			to = netip.AddrPortFrom(loopback(addr), hostPort)
			if got, err := get(c.t, p.node.Namespace, to, "hostname"); err != nil || got != p.name {
				c.t.Errorf("host port at %s of %s: got %q (%v), want %s", to, p.node.Name, got, err, p.name)
			}
		}
	}
}

// loopback returns the loopback address of an address's family.
func loopback(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

// traffic is requests between two pods, one after the other, until it is stopped.
type traffic struct {
	replies atomic.Int64
	stop    func() // returns when it has ended
	err     error  // of the last request
}

// startTraffic has a pod ask another, each time by a connection of its own.
func (c *cluster) startTraffic(from, to pod) *traffic {
	f, stopped, ended := &traffic{}, make(chan struct{}), make(chan struct{})
	f.stop = sync.OnceFunc(func() { close(stopped); <-ended })
	go func() {
		defer close(ended)
		for i := 0; f.err == nil; i++ {
			select {
			case <-stopped:
				return
			default:
				_, f.err = from.ask(netip.AddrPortFrom(to.addrs[i%len(to.addrs)], podPort), "http", "hostname")
				f.replies.Add(1)
			}
		}
	}()
	c.t.Cleanup(f.stop)
	return f
}

// more waits for further replies.
func (f *traffic) more(t *testing.T) {
	t.Helper()
	const some = 10
	before := f.replies.Load()
	testenv.Eventually(t, "traffic", func() error {
		if got := f.replies.Load() - before; got < some {
			return fmt.Errorf("got %d more replies, want %d", got, some)
		}
		return nil
	})
}

// end stops the traffic, of which nothing may have failed.
func (f *traffic) end(t *testing.T) {
	t.Helper()
	f.stop()
	if f.err != nil {
		t.Errorf("request %d: %v", f.replies.Load(), f.err)
	}
	t.Logf("%d requests", f.replies.Load())
}

// testAgentsDeleted ends all agents at once: Kubernetes starts others, and no request fails.
func (c *cluster) testAgentsDeleted() {
	pods := c.web()
	flow := c.startTraffic(pods[0], pods[2])
	flow.more(c.t)
	c.must("delete", "pods", "--namespace=kube-system", "--selector=app.kubernetes.io/name=ebpfnet-node", "--grace-period=0", "--force")
	flow.more(c.t)
	c.rollout("kube-system", "ebpfnet-node")
	flow.more(c.t)
	flow.end(c.t)
	c.testPodToPod()
}

// testUnsynced takes the agents away, and boots a node without one: it says why it is not ready. No packet is lost.
func (c *cluster) testUnsynced() {
	pods := c.web()
	flow := c.startTraffic(pods[0], pods[2])
	third := c.nodes[2]
	c.must("delete", "daemonset", "ebpfnet-node", "--namespace=kube-system", "--cascade=foreground", "--wait")
	third.run("rm", "/run/ebpfnet-node/node.json") // as a boot does
	c.awaitReady(third.Name, "the node agent has not synced since boot: ")
	_, message, _ := c.condition(third.Name)
	c.t.Logf("%s: %s", third.Name, message)
	flow.more(c.t)
	c.startAgents()
	flow.more(c.t)
	flow.end(c.t)
}

// testNodeRemoved removes a node: the others forget it, and their traffic continues. It comes back and is reached again.
func (c *cluster) testNodeRemoved() {
	pods := c.web()
	first, third := c.nodes[0], c.nodes[2]
	number := func() string {
		return c.must("get", "node", third.Name, "--output=jsonpath={.spec.podCIDR}")
	}
	flow := c.startTraffic(pods[0], pods[1])
	prefix := number()
	third.kubelet.kill()
	third.proxy.kill() // would end: it does so when its node has gone
	c.must("delete", "node", third.Name)
	first.awaitPrefix(prefix, noRoute)
	flow.more(c.t)
	third.startKubelet()
	third.startProxy()
	c.awaitReady(third.Name, "")
	first.awaitPrefix(number(), byTunnel)
	flow.more(c.t)
	flow.end(c.t)
	c.t.Logf("%s had %s and has %s", third.Name, prefix, number())
	// Containers that have run on keep addresses that now belong to nobody.
	c.must("delete", "pods", "--selector=app=web", "--field-selector=spec.nodeName="+third.Name)
	c.rollout("default", "web")
	c.testPodToPod()
	c.testService()
}

// describe prints what a person would look at first.
func (c *cluster) describe() {
	for _, args := range []string{"get nodes -o wide", "get pods -A -o wide", "get events -A", "describe nodes"} {
		output, err := c.kubectl(strings.Fields(args)...)
		c.t.Logf("%s: %s %v", args, output, err)
	}
}
