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

// links are those of the cluster: the router is host 254 of each, and a node the host of its number.
var links = []struct {
	prefix4, prefix6 string
	nodes            []int
}{
	{"192.0.2.", "2001:db8:1::", []int{1, 2}},
	{"198.51.100.", "2001:db8:2::", []int{3}},
}

// newCluster has machines, and credentials for all who need them. Nothing runs yet.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	testenv.Require(t, testenv.VXLAN)
	if os.Getenv(testenv.BinDirEnv) == "" {
		t.Fatal("run this with `make cluster`")
	}
	router := testenv.New(t, "router")
	c := &cluster{router: router, controlPlane: newControlPlane(t, router)}
	for i, link := range links {
		bridge := fmt.Sprintf("link%d", i)
		c.ip(router, "link add %s up type bridge", bridge)
		c.ip(router, "addr add %s254/24 dev %s", link.prefix4, bridge)
		c.ip(router, "addr add %sfe/64 dev %s nodad", link.prefix6, bridge)
		for _, number := range link.nodes {
			name := fmt.Sprintf("node-%d", number)
			addrs := [2]netip.Addr{
				netip.MustParseAddr(fmt.Sprintf("%s%d", link.prefix4, number)), netip.MustParseAddr(fmt.Sprintf("%s%d", link.prefix6, number)),
			}
			n := newNode(t, c.controlPlane, name, addrs)
			c.nodes = append(c.nodes, n)
			c.ip(router, "link add %s master %s up type veth peer name eth0 netns %s", name, bridge, n.Path)
			c.ip(n.Namespace, "addr add %s/24 dev eth0", addrs[0])
			c.ip(n.Namespace, "addr add %s/64 dev eth0 nodad", addrs[1])
			c.ip(n.Namespace, "link set eth0 up")
			c.ip(n.Namespace, "route add default via %s254", link.prefix4)
			c.ip(n.Namespace, "route add default via %sfe", link.prefix6)
		}
	}
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if err := router.SetSysctl(name, "1"); err != nil {
			t.Fatal(err)
		}
	}
	return c
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
	podCIDRs := []string{fmt.Sprintf("10.244.%d.0/24", number), fmt.Sprintf("fd00:244:0:%d::/64", number)}
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
	return n.start("ebpfnet-node", "--node="+n.Name, "--kubeconfig=/run/kube/agent.kubeconfig", "--cluster-cidr="+clusterCIDRs,
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
