package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestCluster has containers and hosts of three nodes reach each other, also while agents, the API
// server and nodes fail. Flows between other nodes never lose a packet.
func TestCluster(t *testing.T) {
	c := newCluster(t, clusterCIDRs...)
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	flows := testenv.Askers{c.startFlow(testenv.IPv4, first, third), c.startFlow(testenv.IPv6, second, first)}
	testenv.NoError(t, flows.Lossless(t, func(attempt int) error {
		c.meetFaults(fmt.Sprint("new", attempt))
		return nil
	}))
	first.wantMetrics(`ebpfnet_peer_prefixes{mode="tunnel"} 4`, `ebpfnet_node_ready 1`, `ebpfnet_node_api_up 1`)
}

// meetFaults has agents and the API server fail while nodes come and go. Then a pod starts, and there is a fourth node no more.
func (c *cluster) meetFaults(pod string) {
	c.Helper()
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	second.agent.kill()
	c.wantTraffic("an agent killed")
	second.loadOlder()
	fourth := nodeObjectOf(4)
	fourth.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.4"}}
	c.api.Put(fourth)
	first.awaitRoute("a node added", 4, "dst 198.51.100.4 ")
	second.startAgent()
	second.awaitRoute("a node added while the agent was down", 4, "dst 198.51.100.4 ")
	second.awaitUpgrade()

	second.agent.kill()
	c.api.Remove(fourth.Name)
	first.awaitRoute("a node removed", 4, "")
	second.startAgent()
	second.awaitRoute("a node removed while the agent was down", 4, "")
	first.wantUnreachable("without a container, and a node that has left", 1, 4)

	c.api.SetDown(true)
	third.agent.kill()
	testenv.NoError(c, os.Remove(third.state())) // as a boot does
	third.wantNotReady("is its pod of this node running?")
	third.startAgent()
	third.awaitUnready("the API server has not listed the nodes yet")
	third.wantNotReady("the API server has not listed the nodes yet")
	c.wantTraffic("an agent started without an API server")
	c.api.SetDown(false)
	third.awaitReady()
	if err := third.runtime.Status(testenv.Context(c)); err != nil {
		c.Errorf("STATUS: got %v, want success", err)
	}
	third.runtime.AddPod(c, pod, nil)

	c.api.Put(fourth)
	third.awaitRoute("added again", 4, "dst 198.51.100.4 ")
	c.api.RemoveSilently(fourth.Name)
	c.api.Expire()
	third.awaitRoute("removed, unseen by a watch that has expired", 4, "")
}

// TestNodeChanges has a node come back with another prefix or address, and nodes that are wrong, while others go on.
func TestNodeChanges(t *testing.T) {
	c := newCluster(t)
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	flows := testenv.Askers{c.startFlow(testenv.IPv4, first, second), c.startFlow(testenv.IPv6, second, first)}
	changed := third.object()
	changed.Spec.PodCIDRs = []string{podCIDR4(9).String(), podCIDR6(9).String()}
	testenv.NoError(t, flows.Lossless(t, func(attempt int) error {
		if attempt > 0 { // as before the first one
			c.api.Remove("node-6")
			c.api.Remove(third.Name)
			c.api.Put(third.object())
			third.awaitConflist(podCIDR4(3).String())
			first.awaitRoute("a node back with its first prefix", 3, "dst 198.51.100.3 ")
			second.awaitRoute("a node back with its first prefix", 3, "dst 198.51.100.3 ")
		}
		c.meetWrongNodes(changed)
		return nil
	}))
	flows.Stop()

	third.addPodNamed("again")
	c.wantTraffic("another prefix")

	c.ip(third.Namespace, "addr", "del", third.addrs[0].String()+"/24", "dev", "eth0")
	c.ip(third.Namespace, "addr", "add", "198.51.100.33/24", "dev", "eth0")
	c.ip(third.Namespace, "route", "add", "default", "via", "198.51.100.254")
	changed = changed.DeepCopy()
	changed.Status.Addresses[0].Address = "198.51.100.33"
	c.api.Put(changed)
	first.awaitRoute("another address", 9, "dst 198.51.100.33 ")
	third.awaitRoute("another address of its own", 1, "src 198.51.100.33 ")
	c.wantTraffic("another address")
}

// meetWrongNodes has nodes that are wrong, and the third one with another prefix.
func (c *cluster) meetWrongNodes(changed *corev1.Node) {
	c.Helper()
	first, third := c.nodes[0], c.nodes[2]
	wrong := nodeObjectOf(5) // younger than all others
	wrong.Spec.PodCIDRs = []string{podCIDR4(3).String(), "10.0.0.0/7", "nonsense\x1b[2J", "198.51.100.0/24"}
	wrong.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: third.addrs[0].String()}}
	c.api.Put(wrong, nodeObjectOf(6))
	first.awaitLog(`node=node-5 prefix=10.100.3.0/24`)
	first.awaitLog(`node=node-5 prefix=10.0.0.0/7`)
	first.awaitLog(`node=node-6`)
	c.wantTraffic("wrong nodes")
	c.api.Remove("node-5")

	c.api.Remove(third.Name)
	first.awaitRoute("a node removed", 3, "")
	c.api.Put(changed)
	first.awaitRoute("a node back with another prefix", 9, "dst 198.51.100.3 ")
	third.awaitConflist("10.100.9.0/24")
}

// TestHosts has one cluster after another fault of its network and hosts, since agents take seconds to start.
func TestHosts(t *testing.T) {
	c := newCluster(t)
	c.meetSmallLink()
	c.repairHost()
	c.uninstallHost()
}

// repairHost repairs the tunnel device, routes and a renamed NIC, by the events that they cause.
func (c *cluster) repairHost() {
	c.Helper()
	first, third := c.nodes[0], c.nodes[2]
	for _, fault := range []string{
		"link del ebpfnet0", "link set ebpfnet0 down", "route flush proto 235", "-6 route flush proto 235", "addr flush dev ebpfnet0",
	} {
		c.ip(first.Namespace, strings.Fields(fault)...)
		eventually(c, "node to be repaired after "+fault, func() error {
			for _, f := range testenv.Families {
				if err := testenv.Ping(testenv.Context(c), first.pod.Namespace, f.Pod(third.pod), "-W", "1"); err != nil {
					return err
				}
			}
			return nil
		})
		first.awaitRoute(fault, 3, "dst 198.51.100.3 ")
		c.wantReach(fault, first, third)
		c.wantReach(fault, third, first)
	}
	c.ip(first.Namespace, "link", "set", "eth0", "down")
	c.ip(first.Namespace, "link", "set", "eth0", "name", "lan0")
	c.ip(first.Namespace, "link", "set", "lan0", "up")
	c.ip(first.Namespace, "route", "add", "default", "via", "192.0.2.254")
	c.ip(first.Namespace, "-6", "addr", "add", first.addrs[1].String()+"/64", "dev", "lan0", "nodad") // gone with the link
	c.ip(first.Namespace, "route", "add", "default", "via", "2001:db8:1::fe")
	first.awaitReady()
	c.wantTraffic("NIC renamed")
}

// wantNotReady wants the plugin to refuse containers, and to say why.
func (n *node) wantNotReady(why string) {
	n.t.Helper()
	const since = "the node agent has not synced since boot: "
	for verb, err := range map[string]error{
		"STATUS": n.runtime.Status(testenv.Context(n.t)),
		"ADD":    n.runtime.NewPod(n.t, "early").Add(testenv.Context(n.t)),
	} {
		if err == nil || !strings.Contains(err.Error(), since) || !strings.Contains(err.Error(), why) {
			n.t.Errorf("%s of %s: got error %v, want %q and %q", verb, n.Name, err, since, why)
		}
	}
}

// loadOlder replaces the programs by older ones.
func (n *node) loadOlder() {
	n.t.Helper()
	older := loader.Embedded()
	older.Revision, older.Build = older.Revision-1, 7
	testenv.Must(n.t, n.Upgrade(testenv.Context(n.t), older))
}

// awaitUpgrade waits until the agent, which has few rights, has replaced all older programs.
func (n *node) awaitUpgrade() {
	n.t.Helper()
	eventually(n.t, "programs of "+n.Name, func() error {
		return n.WithDatapath(func(datapath *loader.Datapath) error {
			builds, err := os.ReadDir(filepath.Join(datapath.Dir(), "progs"))
			if err == nil && (datapath.Config.Build != loader.Embedded().Build || len(builds) != 1) {
				err = fmt.Errorf("got build %x beside %v, want the agent's alone", datapath.Config.Build, builds)
			}
			return err
		})
	})
}

// awaitRoute waits until the route to a node's IPv4 prefix has a text in it, or is gone.
func (n *node) awaitRoute(what string, number int, want string) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("route of %s to node %d: %s", n.Name, number, what), func() error {
		got, err := n.Run(testenv.Context(n.t), "ip", "route", "show", podCIDR4(number).String())
		if err != nil {
			return err
		}
		if want == "" && got != "" || !strings.Contains(got, want) {
			return fmt.Errorf("got %q, want %q", got, want)
		}
		return nil
	})
}

// awaitLog waits until the agent has logged a line with a text in it.
func (n *node) awaitLog(want string) {
	n.t.Helper()
	eventually(n.t, "line in the log of "+n.Name, func() error {
		got := n.agent.output.String()
		if !slices.ContainsFunc(strings.Split(got, "\n"), func(line string) bool { return strings.Contains(line, want) }) {
			return fmt.Errorf("got %q, want %q", got, want)
		}
		return nil
	})
}

func (n *node) awaitConflist(want string) {
	n.t.Helper()
	eventually(n.t, "conflist of "+n.Name, func() error {
		got, err := os.ReadFile(n.conflist())
		if err == nil && !strings.Contains(string(got), want) {
			err = fmt.Errorf("got %s, want %q", got, want)
		}
		return err
	})
}

// wantMetrics waits for lines among the agent's figures.
func (n *node) wantMetrics(want ...string) {
	n.t.Helper()
	eventually(n.t, "metrics of "+n.Name, func() error {
		code, body, err := n.get("/metrics")
		for _, line := range want {
			if err != nil || code != http.StatusOK || !slices.Contains(strings.Split(body, "\n"), line) {
				return fmt.Errorf("got %d (%w) without %q:\n%s", code, err, line, body)
			}
		}
		return nil
	})
}

// probes counts the questions that the node's agent has sent.
func (n *node) probes() int {
	n.t.Helper()
	text, err := n.Run(testenv.Context(n.t), "nft", "list", "table", "inet", "probes")
	testenv.Must(n.t, err)
	return firstNumber(n.t, `counter packets (\d+)`, text)
}

// directLost reads how often the agent has lost direct nodes.
func (n *node) directLost() int {
	n.t.Helper()
	code, body, err := n.get("/metrics")
	testenv.Must(n.t, err)
	if code != http.StatusOK {
		n.t.Fatalf("metrics of %s: got %d: %s", n.Name, code, body)
	}
	return firstNumber(n.t, `(?m)^ebpfnet_node_direct_lost_total (\d+)$`, body)
}

func firstNumber(t *testing.T, pattern, text string) int {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(text)
	if found == nil {
		t.Fatalf("no %s in %s", pattern, text)
	}
	number, err := strconv.Atoi(found[1])
	testenv.Must(t, err)
	return number
}

// nft changes the router's rules.
func (c *cluster) nft(commands ...string) {
	c.Helper()
	for _, command := range commands {
		if _, err := c.router.Run(testenv.Context(c), "nft", command); err != nil {
			c.Fatal(err)
		}
	}
}

// TestUnderlayIPv6 has nodes reach each other's containers of both families over IPv6.
func TestUnderlayIPv6(t *testing.T) {
	c := newCluster(t, "--prefer-ipv6", "--port", "8472", "--vni", "7")
	c.nodes[0].awaitRoute("over IPv6", 3, "encap ip6 id 7 src 2001:db8:1::1 dst 2001:db8:2::3 ")
}

// uninstallHost takes everything out of a host in the right order: first what makes containers, last what DEL needs.
func (c *cluster) uninstallHost() {
	c.Helper()
	first, second, third := c.nodes[0], c.nodes[1], c.nodes[2]
	first.agent.kill()
	hasPolicies := func() bool {
		policies, err := nodestate.ReadPolicies(first.state())
		return policies != nil || err != nil
	}
	testenv.Must(c, nodestate.WritePolicies(first.state(), nodestate.Policies{}))
	uninstall := func() (string, error) {
		output, err := first.command(testenv.Context(c), "uninstall").CombinedOutput()
		return string(output), err
	}
	if output, err := uninstall(); err == nil || !strings.Contains(output, "containers are connected: 1, such as ebpfnet pods pod-of-node-1 eth0") {
		c.Errorf("with a container: got %q (%v), want an error that names it", output, err)
	}
	for _, file := range []string{first.conflist(), first.state()} {
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			c.Errorf("got %s (%v), want none", file, err)
		}
	}
	if !hasPolicies() {
		c.Error("no namespace has policies for an ADD that is under way")
	}
	c.wantTraffic("with a container")
	if err := first.pod.Del(testenv.Context(c)); err != nil {
		c.Error(err)
	}
	first.chain("ptp0")
	if output, err := uninstall(); err == nil || !strings.Contains(output, "containers are connected: 1, such as the one behind ptp0") {
		c.Errorf("with a chained container: got %q (%v), want an error that names it", output, err)
	}
	c.ip(first.Namespace, "link", "del", "ptp0")
	for range 2 {
		if output, err := uninstall(); err != nil {
			c.Errorf("without containers: got %q (%v), want success", output, err)
		}
	}
	if hasPolicies() {
		c.Errorf("%s is left", nodestate.PoliciesOf(first.state()))
	}
	if links := c.ip(first.Namespace, "-br", "link"); strings.Contains(links, "ebpfnet0") {
		c.Errorf("got devices\n%swant no ebpfnet0", links)
	}
	if routes := c.ip(first.Namespace, "route", "show", "proto", "235"); routes != "" {
		c.Errorf("got routes\n%swant none", routes)
	}
	if plugins, err := os.ReadDir(first.binDir()); err != nil || len(plugins) > 0 {
		c.Errorf("got plugins %v (%v), want none", plugins, err)
	}
	if err := first.Do(func() error { _, err := loader.OpenLoaded(); return err }); !errors.Is(err, loader.ErrNotLoaded) {
		c.Errorf("got %v, want %v", err, loader.ErrNotLoaded)
	}
	c.wantReach("after one has gone", second, third)
}

// chain has a device of another plugin that ebpfnet works on, as the agent's pod sees it: its record is the host's.
func (n *node) chain(device string) {
	n.t.Helper()
	link := netlink.NewLinkAttrs()
	link.Name = device
	testenv.Must(n.t, n.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: link, PeerName: device + "-peer"}))
	added, err := n.Netlink().LinkByName(device)
	testenv.Must(n.t, err)
	err = n.WithDatapath(func(datapath *loader.Datapath) error {
		return maps.With(testenv.Context(n.t), datapath, func(store *maps.Store) error {
			return store.PutDevice(maps.Device{IfIndex: added.Attrs().Index, Owner: 1, MAC: make(net.HardwareAddr, 6)})
		})
	})
	testenv.Must(n.t, err)
}

// meetSmallLink has a link in the middle that takes less than the nodes' own: nothing is lost, neither of TCP nor of UDP.
func (c *cluster) meetSmallLink() {
	const size, largest = 1 << 20, 1350 // of a datagram that fits the tunnel's own MTU

	c.Helper()
	first, third := c.nodes[0], c.nodes[2]
	for _, device := range []string{"link0", "link1"} { // what the router sends; it receives longer frames, too
		c.ip(c.router, "link", "set", device, "mtu", "1400")
	}
	for _, f := range testenv.Families {
		for _, way := range [][2]*node{{first, third}, {third, first}} {
			from, to := way[0].pod, way[1].pod
			server := netip.AddrPortFrom(f.Pod(to), 7000)
			if err := testenv.Transfer(testenv.Context(c), from.Namespace, to.Namespace, server, server, size, 1); err != nil {
				c.Errorf("TCP from %s to %s: %v", from.Name, server, err)
			}
			datagrams := testenv.ServeUDP(c, to.Namespace, server)
			if _, err := testenv.Ask(testenv.Context(c), from.Namespace, "udp", server, strings.Repeat("x", largest)); err != nil {
				c.Errorf("UDP from %s to %s: %v", from.Name, server, err)
			}
			datagrams.Close()
		}
	}
	first.wantPeers("a small link", "peers good: node-2 (192.0.2.2)\npeers warning: a link to node-3 (198.51.100.3) carries no packets of 1500 bytes")
}
