package kube

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// cluster is three nodes, two on one link and the third on another, and a router between the links with the control plane.
type cluster struct {
	*controlPlane
	router *testenv.Namespace
	nodes  []*node
}

// links have the numbers of their nodes.
var links = [2][]int{{1, 2}, {3}}

// newCluster has machines, and credentials for all who need them. Nothing runs yet.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	testenv.Require(t, testenv.VXLAN)
	if os.Getenv(testenv.BinDirEnv) == "" {
		t.Fatal("run this with `make cluster`")
	}
	lockCgroups(t)
	router := testenv.New(t, "router")
	c := &cluster{router: router, controlPlane: newControlPlane(t, router)}
	for link, numbers := range links {
		bridge := fmt.Sprintf("link%d", link)
		c.ip(router, "link add %s up type bridge", bridge)
		for _, f := range families {
			c.ip(router, "addr add %s dev %s nodad", f.host(link, routerNumber), bridge)
		}
		for _, number := range numbers {
			c.addNode(link, number, bridge)
		}
	}
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		testenv.Must(t, router.SetSysctl(name, "1"))
	}
	return c
}

// addNode makes a node and connects it with a link.
func (c *cluster) addNode(link, number int, bridge string) {
	c.t.Helper()
	n := newNode(c.t, c.controlPlane, fmt.Sprintf("node-%d", number))
	c.nodes = append(c.nodes, n)
	c.ip(c.router, "link add %s master %s up type veth peer name eth0 netns %s", n.Name, bridge, n.Path)
	c.ip(n.Namespace, "link set eth0 up")
	for _, f := range families {
		addr := f.host(link, number)
		n.addrs = append(n.addrs, addr.Addr())
		c.ip(n.Namespace, "addr add %s dev eth0 nodad", addr)
		c.ip(n.Namespace, "route add default via %s", f.host(link, routerNumber).Addr())
	}
}

func (c *cluster) ip(ns *testenv.Namespace, format string, args ...any) {
	c.t.Helper()
	if _, err := ns.Run(testenv.Context(c.t), "ip", strings.Fields(fmt.Sprintf(format, args...))...); err != nil {
		c.t.Fatal(err)
	}
}

// object returns the Node object of a node without a kubelet.
func (n *node) object(number int) []byte {
	var addresses []map[string]string
	for _, addr := range n.addrs {
		addresses = append(addresses, map[string]string{"type": "InternalIP", "address": addr.String()})
	}
	var podCIDRs []string
	for _, f := range families {
		podCIDRs = append(podCIDRs, fmt.Sprintf(f.nodePods, number))
	}
	return encode(map[string]any{
		"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": n.Name},
		"spec": map[string]any{"podCIDR": podCIDRs[0], "podCIDRs": podCIDRs}, "status": map[string]any{"addresses": addresses},
	})
}

// startAgent starts an agent as a process, with the rights of its service account.
func (n *node) startAgent(kubeconfig string) *daemon {
	n.t.Helper()
	n.write("/run/kube/agent.kubeconfig", kubeconfig)
	n.run("mkdir", "-p", "/opt/cni/bin", "/etc/cni/net.d", "/run/ebpfnet-node") // as its pod's volumes do
	return n.start("ebpfnet-node", "--node="+n.Name, "--kubeconfig=/run/kube/agent.kubeconfig", "--cluster-cidr="+podPrefixes(), "--mode="+*agentMode,
		"--bin-dir=/opt/cni/bin")
}

// addPod connects a network namespace of the node and returns its addresses.
func (n *node) addPod(name string) (addrs []netip.Addr) {
	n.t.Helper()
	n.run("ip", "netns", "add", name)
	var result struct {
		IPs []struct{ Address netip.Prefix }
	}
	output := n.run(binary(n.t, "cnitool"), "add", "pods", "/run/netns/"+name)
	if err := json.Unmarshal([]byte(output), &result); err != nil {
		n.t.Fatalf("%v: %s", err, output)
	}
	for _, ip := range result.IPs {
		addrs = append(addrs, ip.Address.Addr())
	}
	return addrs
}
