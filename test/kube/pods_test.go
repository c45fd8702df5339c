package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// health is the container whose probes ask for files.
const health = "health"

// exec runs a command of a shell in a pod's container.
func (c *cluster) exec(p pod, container, command string) (string, error) {
	return c.kubectl("exec", p.name, "--container="+container, "--", "sh", "-c", command)
}

func (c *cluster) mustExec(p pod, container, command string) {
	c.t.Helper()
	if _, err := c.exec(p, container, command); err != nil {
		c.t.Fatal(err)
	}
}

// restarts is how often each of a pod's containers was started again.
func (c *cluster) restarts(p pod) string {
	c.t.Helper()
	return c.must("get", "pod", p.name, "--output=jsonpath={range .status.containerStatuses[*]}{.name}: {.restartCount} {end}")
}

// testProbes wants kubelet's probes to reach the pods of each node, the first over TCP: one that replies that it is not ready
// leaves the service until it is, and a container that replies that it is not alive is started anew.
func (c *cluster) testProbes() {
	for _, p := range c.web() {
		c.mustExec(p, health, "rm /tmp/ready")
		c.awaitProbe(p, "Readiness")
		for _, addr := range c.serviceAddrs() {
			c.awaitWithout(p, addr)
		}
		c.mustExec(p, health, "touch /tmp/ready")
	}
	c.testService()
	for _, p := range c.web() {
		before := c.restarts(p)
		c.mustExec(p, health, "rm /tmp/alive")
		c.awaitProbe(p, "Liveness")
		c.eventually("restart of "+p.name, func() error {
			if c.restarts(p) == before {
				return fmt.Errorf("got restarts %q as before", before)
			}
			return nil
		})
	}
	c.web()
}

// awaitProbe waits for an event that a probe has failed with a reply of the pod.
func (c *cluster) awaitProbe(p pod, kind string) {
	c.t.Helper()
	want := kind + " probe failed: HTTP probe failed with statuscode: 404"
	c.eventually("probe of "+p.name, func() error {
		events, err := c.kubectl("get", "events", "--field-selector=reason=Unhealthy,involvedObject.name="+p.name, "--output=jsonpath={.items[*].message}")
		if err == nil && !strings.Contains(events, want) {
			err = fmt.Errorf("got events %q, want %q", events, want)
		}
		return err
	})
}

// awaitWithout waits until a pod gets none of many requests to the service.
func (c *cluster) awaitWithout(p pod, service netip.Addr) {
	c.t.Helper()
	c.eventually(fmt.Sprintf("service at %s without %s", service, p.name), func() error {
		for range 20 {
			got, err := p.ask(netip.AddrPortFrom(service, 80), "http", "hostname")
			if err != nil || got == p.name {
				return fmt.Errorf("got a reply of %q (%v), want others'", got, err)
			}
		}
		return nil
	})
}

// testExec wants `kubectl exec` to run a command in the network of each pod, and `kubectl port-forward` to reach the pod's
// server.
func (c *cluster) testExec() {
	pods := c.web()
	for i, p := range pods {
		other := pods[(i+1)%len(pods)]
		for j, addr := range p.addrs {
			to := netip.AddrPortFrom(other.addrs[j], podPort)
			got, err := c.exec(p, health, fmt.Sprintf("wget -qO- http://%s/clientip", to))
			client, _ := netip.ParseAddrPort(got)
			if err != nil || client.Addr() != addr {
				c.t.Errorf("exec in %s (%s): got client %q (%v) at %s, want %s", p.name, p.node.Name, got, err, to, addr)
			}
		}
		if got, err := get(c.t, c.ns, c.forward(p), "hostname"); err != nil || got != p.name {
			c.t.Errorf("port-forward to %s (%s): got %q (%v)", p.name, p.node.Name, got, err)
		}
	}
}

// forward has kubectl forward a port to a pod's server until the test ends.
func (c *cluster) forward(p pod) (to netip.AddrPort) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(testenv.Context(c.t))
	cmd := c.kubectlCommand(ctx, "port-forward", "pod/"+p.name, fmt.Sprintf(":%d", podPort))
	stdout, err := cmd.StdoutPipe()
	testenv.Must(c.t, err)
	testenv.Must(c.t, cmd.Start())
	c.t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
	})
	var port uint16
	if _, err := fmt.Fscanf(stdout, "Forwarding from 127.0.0.1:%d", &port); err != nil {
		c.t.Fatalf("port-forward to %s: got no port: %v", p.name, err)
	}
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
}

// testRestart kills kubelet and containerd of a node at once and starts them again: no request to or from its pods fails,
// and they run on with their addresses. What the killed containerd has connected, the next one disconnects.
func (c *cluster) testRestart() {
	pods := c.web()
	first, third := pods[0], pods[2]
	flows := []*traffic{c.startTraffic(first, third), c.startTraffic(third, first)}
	more := func() {
		c.t.Helper()
		for _, flow := range flows {
			flow.more(c.t)
		}
	}
	more()
	restarts := c.restarts(third)
	third.node.kubelet.kill()
	third.node.containerd.kill()
	more()
	third.node.startContainerd()
	third.node.startKubelet()
	c.eventually("exec in "+third.name, func() error {
		_, err := c.exec(third, health, "true")
		return err
	})
	more()
	for _, flow := range flows {
		flow.end(c.t)
	}
	wantPods(c.t, c.web(), pods)
	if got := c.restarts(third); got != restarts {
		c.t.Errorf("%s: got restarts %q, want %q", third.name, got, restarts)
	}
	c.must("delete", "pod", third.name)
	if attached := third.node.run("ebpfnetctl", "attachments"); strings.Contains(attached, third.addrs[0].String()) {
		c.t.Errorf("after the end of %s: got attachments %s, want none with %s", third.name, attached, third.addrs[0])
	}
	c.testPodToPod()
}

// wantPods wants pods to be the same with the same addresses.
func wantPods(t *testing.T, got, want []pod) {
	t.Helper()
	if !slices.EqualFunc(got, want, func(a, b pod) bool { return a.name == b.name && slices.Equal(a.addrs, b.addrs) }) {
		t.Errorf("got pods %v, want %v", got, want)
	}
}
