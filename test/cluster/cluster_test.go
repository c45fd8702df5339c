package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/apitest"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// cluster is three nodes: two on one link, the third on another, and a router between the links, which has the API
// server and knows no containers.
type cluster struct {
	*testing.T
	router *testenv.Namespace
	api    *apitest.Server
	nodes  []*node
	sent   atomic.Int64 // bytes of the API server
}

// node is a host with an agent, a runtime and a container.
type node struct {
	*testenv.Namespace
	t       *testing.T
	number  int
	addrs   [2]netip.Addr // IPv4, IPv6
	dir     string        // for its files
	options []string      // of the agent
	agent   *agent
	// capabilities are those of the agent.
	capabilities []string
	runtime      *testenv.Runtime
	pod          *testenv.Pod
}

// links are those of the cluster.
var links = []struct {
	prefix4, prefix6 netip.Prefix
	nodes            []int // numbers
}{
	{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8:1::/64"), []int{1, 2}},
	{netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:2::/64"), []int{3}},
}

const apiPort = 6443

// clusterCIDRs are options of the agent.
var clusterCIDRs = []string{"--cluster-cidr", "10.100.0.0/16", "--cluster-cidr", "fd44::/16"}

// hostOn returns the address of a host on a link: of a node by its number, of the router by 254.
func hostOn(prefix netip.Prefix, host byte) netip.Addr {
	raw := prefix.Addr().AsSlice()
	raw[len(raw)-1] = host
	addr, _ := netip.AddrFromSlice(raw)
	return addr
}

const routerHost = 254

// newCluster starts the agents, and waits until all nodes have what they should and a container each.
func newCluster(t *testing.T, options ...string) *cluster {
	t.Helper()
	c := newIdleCluster(t, options...)
	c.startNodes()
	return c
}

func (c *cluster) startNodes() {
	c.Helper()
	for _, n := range c.nodes {
		c.api.Put(n.object())
	}
	for _, n := range c.nodes {
		n.startAgent()
		n.awaitReady() // they share a lock, as hosts do not: one waits while another loads the programs
	}
	for _, n := range c.nodes {
		n.addPod()
	}
	c.wantTraffic("first")
}

// newIdleCluster has links and an API server without nodes.
func newIdleCluster(t *testing.T, options ...string) *cluster {
	t.Helper()
	testenv.Require(t, testenv.VXLAN)
	c := &cluster{T: t, router: testenv.New(t, "router"), api: apitest.New()}
	for i, link := range links {
		bridge := fmt.Sprintf("link%d", i)
		address := fmt.Sprintf("02:00:00:00:00:%02x", i) // else its ports' lowest, which changes when they do
		c.ip(c.router, "link", "add", bridge, "address", address, "up", "type", "bridge")
		c.ip(c.router, "addr", "add", fmt.Sprintf("%s/24", hostOn(link.prefix4, routerHost)), "dev", bridge)
		c.ip(c.router, "addr", "add", fmt.Sprintf("%s/64", hostOn(link.prefix6, routerHost)), "dev", bridge, "nodad")
		for _, number := range link.nodes {
			c.addNode(number, bridge, link.prefix4, link.prefix6, options)
		}
	}
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		testenv.Must(t, c.router.SetSysctl(name, "1"))
	}
	c.serveAPI()
	t.Cleanup(func() {
		for _, dir := range []string{loader.Root, record.DefaultDir} {
			testenv.NoError(t, os.RemoveAll(dir))
		}
	})
	return c
}

func (c *cluster) ip(ns *testenv.Namespace, args ...string) string {
	c.Helper()
	output, err := ns.Run(testenv.Context(c), "ip", args...)
	testenv.Must(c, err)
	return output
}

func (c *cluster) addNode(number int, bridge string, prefix4, prefix6 netip.Prefix, options []string) {
	c.Helper()
	name := fmt.Sprintf("node-%d", number)
	n := &node{
		Namespace: testenv.New(c, name), t: c.T, number: number, capabilities: capabilities(c), dir: c.TempDir(), options: options,
		addrs: [2]netip.Addr{hostOn(prefix4, byte(number)), hostOn(prefix6, byte(number))},
	}
	c.nodes = append(c.nodes, n)
	c.ip(c.router, "link", "add", name, "master", bridge, "up", "type", "veth", "peer", "name", "eth0", "netns", n.Path)
	c.ip(n.Namespace, "addr", "add", n.addrs[0].String()+"/24", "dev", "eth0")
	c.ip(n.Namespace, "addr", "add", n.addrs[1].String()+"/64", "dev", "eth0", "nodad")
	c.ip(n.Namespace, "link", "set", "eth0", "up")
	for _, prefix := range []netip.Prefix{prefix4, prefix6} {
		c.ip(n.Namespace, "route", "add", "default", "via", hostOn(prefix, routerHost).String())
	}
	testenv.Must(c, n.WaitUp("eth0"))
	testenv.Must(c, os.Mkdir(n.binDir(), 0o755))
	n.write("template", fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "pods", "plugins": [{"type": "ebpfnet", "ipMasq": true,
		"maxFlows": 65536, "ipam": {"type": "host-local", "dataDir": %q}}]}`, filepath.Join(n.dir, "ipam")))
	n.write("kubeconfig", fmt.Sprintf(`{"clusters": [{"name": "c", "cluster": {"server": "http://%s:%d"}}],
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`, hostOn(prefix4, routerHost), apiPort))
}

// capabilities are those of the manifest, and one to raise the limit of locked memory where maps count.
func capabilities(tb testenv.TB) []string {
	tb.Helper()
	names := []string{"net_admin", "bpf", "perfmon"}
	if mapsAreLocked(tb) {
		names = append(names, "sys_resource")
	}
	return names
}

func (n *node) write(name, content string) {
	n.t.Helper()
	testenv.Must(n.t, os.WriteFile(filepath.Join(n.dir, name), []byte(content), 0o600))
}

// serveAPI serves on all addresses of the router.
func (c *cluster) serveAPI() {
	c.Helper()
	listener, err := c.router.Listen(testenv.Context(c), netip.AddrPortFrom(netip.IPv6Unspecified(), apiPort))
	testenv.Must(c, err)
	server := &http.Server{Handler: c.api}
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(counted{listener, &c.sent}) })
	c.Cleanup(func() {
		server.Close()
		served.Wait()
		if _, bad := c.api.Requests(); len(bad) > 0 {
			c.Errorf("requests of the API: %q", bad)
		}
	})
}

// counted is a listener whose connections count what they send.
type counted struct {
	net.Listener
	sent *atomic.Int64
}

func (l counted) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	return countedConn{conn, l.sent}, err
}

type countedConn struct {
	net.Conn
	sent *atomic.Int64
}

func (c countedConn) Write(data []byte) (int, error) {
	c.sent.Add(int64(len(data)))
	return c.Conn.Write(data)
}

// object returns the Node object.
func (n *node) object() *corev1.Node {
	object := nodeObjectOf(n.number)
	for _, addr := range n.addrs {
		object.Status.Addresses = append(object.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: addr.String()})
	}
	return object
}

// nodeObjectOf returns a Node object with a prefix of each family, and without addresses.
func nodeObjectOf(number int) *corev1.Node {
	podCIDRs := []string{podCIDR4(number).String(), podCIDR6(number).String()}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", number), CreationTimestamp: metav1.Unix(int64(number), 0)},
		Spec:       corev1.NodeSpec{PodCIDR: podCIDRs[0], PodCIDRs: podCIDRs},
	}
}

// agent is a running process.
type agent struct {
	*exec.Cmd
	output synced
	ended  chan struct{}
}

// synced is a buffer for two goroutines.
type synced struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (s *synced) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buffer.Write(p)
}

func (s *synced) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buffer.String()
}

func (n *node) conflist() string { return filepath.Join(n.dir, "10-ebpfnet.conflist") }

func (n *node) state() string { return filepath.Join(n.dir, "node.json") }

func (n *node) binDir() string { return filepath.Join(n.dir, "bin") }

// command returns the agent's, with the plugins beside it.
func (n *node) command(ctx context.Context, args ...string) *exec.Cmd {
	n.t.Helper()
	for _, plugin := range []string{"./cmd/ebpfnet", "./cmd/ebpfnet-ipam"} {
		testenv.Build(n.t, plugin)
	}
	binary := testenv.Build(n.t, "github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node")
	return n.Command(ctx, "setpriv", slices.Concat([]string{
		"--bounding-set", "-all,+" + strings.Join(n.capabilities, ",+"), binary,
		"--node", n.Name, "--kubeconfig", filepath.Join(n.dir, "kubeconfig"), "--template", filepath.Join(n.dir, "template"),
		"--conflist", n.conflist(), "--state", n.state(), "--bin-dir", n.binDir(),
	}, n.options, args)...)
}

func (n *node) startAgent() {
	n.t.Helper()
	n.start(n.command(context.Background()))
}

// start starts the agent by a command. The end of the test ends it.
func (n *node) start(cmd *exec.Cmd) *agent {
	n.t.Helper()
	a := &agent{Cmd: cmd, ended: make(chan struct{})}
	a.Stdout, a.Stderr = &a.output, &a.output
	testenv.Must(n.t, a.Start())
	go func() { defer close(a.ended); _ = a.Wait() }()
	n.agent = a
	n.t.Cleanup(func() {
		a.kill()
		if n.t.Failed() {
			n.t.Logf("agent of %s:\n%s", n.Name, a.output.String())
		}
	})
	return a
}

// kill ends the agent at once. It may have ended before.
func (a *agent) kill() {
	_ = a.Process.Kill()
	<-a.ended
}

// get asks the agent's own server.
func (n *node) get(path string) (code int, body string, err error) {
	client := &http.Client{Timeout: testenv.Timeout, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return n.DialFrom(ctx, "tcp", netip.AddrPort{}, netip.MustParseAddrPort("127.0.0.1:9909"))
	}}}
	response, err := client.Get("http://agent" + path)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	var content bytes.Buffer
	_, err = content.ReadFrom(response.Body)
	return response.StatusCode, strings.TrimSpace(content.String()), err
}

// eventually is testenv.Eventually with more patience: an agent that starts loads programs, which is seconds of work.
func eventually(tb testenv.TB, what string, cond func() error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*testenv.Timeout)
	defer cancel()
	if err := testenv.Wait(ctx, what, cond); err != nil {
		tb.Fatalf("%v", err)
	}
}

// awaitReady waits until the agent says that the node has what it should.
func (n *node) awaitReady() {
	n.t.Helper()
	eventually(n.t, "agent of "+n.Name+" to be ready", func() error {
		if code, body, err := n.get("/readyz"); err != nil || code != http.StatusOK {
			return fmt.Errorf("got %d %s (%w)", code, body, err)
		}
		return nil
	})
}

// awaitUnready waits until the agent says why the node has not what it should.
func (n *node) awaitUnready(want string) {
	n.t.Helper()
	eventually(n.t, "agent of "+n.Name+" to say why it is not ready", func() error {
		if code, body, err := n.get("/readyz"); err != nil || code != http.StatusServiceUnavailable || !strings.Contains(body, want) {
			return fmt.Errorf("got %d %s (%w), want %q", code, body, err, want)
		}
		return nil
	})
}

// addPod has the runtime take the conflist that the agent has written, and start a container.
func (n *node) addPod() {
	n.t.Helper()
	n.addPodNamed("pod-of-" + n.Name)
}

func (n *node) addPodNamed(id string) {
	n.t.Helper()
	content := testenv.ReadFile(n.t, n.conflist())
	n.runtime = testenv.NewRuntime(n.t, n.Namespace, content, n.binDir())
	n.pod = n.runtime.AddPod(n.t, id, nil)
}

// wantTraffic wants each container to reach all others, and each host, under its own address.
func (c *cluster) wantTraffic(what string) {
	c.Helper()
	for _, to := range c.nodes {
		for _, from := range c.nodes {
			if from != to {
				c.wantReach(what, from, to)
			}
		}
	}
}

func (c *cluster) wantReach(what string, from, to *node) {
	c.Helper()
	for _, f := range testenv.Families {
		server := testenv.ServeTCP(c, to.pod.Namespace, netip.AddrPortFrom(f.Pod(to.pod), 0))
		c.wantAnswer(what+": container", from.pod.Namespace, server, f.Pod(from.pod))
		c.wantAnswer(what+": host", from.Namespace, server, netip.Addr{})
		server.Close()
	}
}

// wantAnswer wants the server to see the client's own address, unless that is invalid.
func (c *cluster) wantAnswer(what string, from *testenv.Namespace, server *testenv.Server, own netip.Addr) {
	c.Helper()
	reply, err := testenv.Ask(testenv.Context(c), from, "tcp", server.Addr, "hello")
	if err != nil {
		c.Errorf("%s: %s asks %s: %v", what, from.Name, server.Addr, err)
	} else if own.IsValid() && reply.Peer.Addr() != own {
		c.Errorf("%s: %s sees %s, want the container's own %s", what, server.Addr, reply.Peer, own)
	}
}

// wantUnreachable wants errors at once for addresses of these nodes' prefixes that no container has: for the container, and
// for the host.
func (n *node) wantUnreachable(what string, numbers ...int) {
	n.t.Helper()
	for _, number := range numbers {
		for _, prefix := range []netip.Prefix{podCIDR4(number), podCIDR6(number)} {
			server := netip.AddrPortFrom(hostOn(prefix, 77), 80)
			for _, from := range []*testenv.Namespace{n.pod.Namespace, n.Namespace} {
				_, err := testenv.Ask(testenv.Context(n.t), from, "tcp", server, "hello")
				if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) {
					n.t.Errorf("%s: %s asks %s: %v, want that it is unreachable", what, from.Name, server, err)
				}
			}
		}
	}
}

// startFlow asks a container from another one all the time over UDP: nothing repeats what is lost.
func (c *cluster) startFlow(f testenv.Family, from, to *node) *testenv.Asker {
	c.Helper()
	server := testenv.ServeUDP(c, to.pod.Namespace, netip.AddrPortFrom(f.Pod(to.pod), 0))
	client, err := testenv.NewClient(testenv.Context(c), from.pod.Namespace, "udp", netip.AddrPort{}, server.Addr)
	testenv.Must(c, err)
	c.Cleanup(func() { client.Close() })
	return client.KeepAsking(c, fmt.Sprintf("%s asks %s", from.pod.Name, server.Addr), time.Millisecond)
}
