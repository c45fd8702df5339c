package kube

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// churnPorts are the host ports of pods that come and go. Pods of one port are on different nodes.
const (
	firstChurnPort = 9000
	churnPorts     = 10
)

// testChurn makes short pods on all nodes under traffic between others, which fails no request, and removes them. Each
// reaches the web service, and none leaves anything.
func (c *cluster) testChurn() {
	const most = 100 // before they are removed
	pods := c.web()
	before := map[*node]string{}
	for _, n := range c.nodes {
		before[n] = n.state()
	}
	flow := c.startTraffic(pods[0], pods[2])
	for made := 0; made < *churn; made += most {
		c.churn(min(*churn-made, most) / churnPorts)
		for _, n := range c.nodes {
			n.awaitState(before[n])
		}
	}
	flow.more(c.t)
	flow.end(c.t)
	refused := c.must("get", "events", "--field-selector=reason=FailedCreatePodSandBox", `--output=jsonpath={range .items[*]}{.message}{"\n"}{end}`)
	c.t.Logf("%d pods; refused at first:\n%s", *churn, refused)
}

// churn makes pods for each port, waits until all have succeeded, and removes them.
func (c *cluster) churn(podsForEach int) {
	c.t.Helper()
	manifest, err := os.ReadFile("manifests/churn.yaml")
	if err != nil {
		c.t.Fatal(err)
	}
	services := c.serviceAddrs()
	for i := range churnPorts {
		settings := strings.NewReplacer("$PORT", strconv.Itoa(firstChurnPort+i), "$PODS", strconv.Itoa(podsForEach),
			"$SERVICE", netip.AddrPortFrom(services[i%len(services)], 80).String())
		if _, err := c.apply([]byte(settings.Replace(string(manifest))), "create", "--filename=-"); err != nil {
			c.t.Fatal(err)
		}
	}
	for ended := 0; ended < churnPorts*podsForEach; {
		c.eventually("end of more pods", func() error {
			if failed := c.sum("failed"); failed > 0 {
				c.t.Fatalf("%d pods failed: %s", failed, c.must("describe", "pods", "--selector=app=churn"))
			}
			before := ended
			if ended = c.sum("succeeded"); ended == before {
				return fmt.Errorf("got %d of %d", ended, churnPorts*podsForEach)
			}
			return nil
		})
	}
	where := c.must("get", "pods", "--selector=app=churn", "--output=jsonpath={.items[*].spec.nodeName}")
	for _, n := range c.nodes {
		c.t.Logf("%d pods on %s", strings.Count(where, n.Name), n.Name)
		if !strings.Contains(where, n.Name) {
			c.t.Errorf("no pod was on %s", n.Name)
		}
	}
	c.eventually("removal of jobs", func() error {
		_, err := c.kubectl("delete", "jobs", "--selector=app=churn", "--cascade=foreground", "--timeout=10s")
		return err
	})
}

// sum adds up what the jobs' status has of pods.
func (c *cluster) sum(field string) (sum int) {
	c.t.Helper()
	for number := range strings.FieldsSeq(c.must("get", "jobs", "--selector=app=churn", "--output=jsonpath={.items[*].status."+field+"}")) {
		n, err := strconv.Atoi(number)
		if err != nil {
			c.t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// state lists what pods leave on a node: attachments, host ports, entries of maps, devices, network namespaces, and files of
// CNI.
func (n *node) state() string {
	n.t.Helper()
	return n.run("sh", "-c", `
		ebpfnetctl attachments && ebpfnetctl ports && ebpfnetctl metrics | grep ^ebpfnet_map_entries
		ip -brief link | cut -d ' ' -f 1
		find /run/netns /run/ebpfnet /var/lib/cni ! -type d ! -name 'last_reserved_ip.*' ! -name '*lock*' | sort
		grep -c nsfs /proc/self/mounts`)
}

// awaitState waits until the node has what it had.
func (n *node) awaitState(want string) {
	n.t.Helper()
	n.control.eventually("end of the pods of "+n.Name, func() error {
		if got := n.state(); got != want {
			return fmt.Errorf("got\n%s\nwant\n%s", got, want)
		}
		return nil
	})
}
