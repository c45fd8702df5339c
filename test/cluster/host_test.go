package cluster

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// fakeDatapath keeps what is set.
type fakeDatapath struct {
	tunnel maps.Tunnel
	nodes  []maps.Node
	refuse string // "tunnel" or "nodes"
}

var errRefused = errors.New("refused")

func (f *fakeDatapath) Tunnel() (maps.Tunnel, error) { return f.tunnel, nil }
func (f *fakeDatapath) Nodes() ([]maps.Node, error)  { return f.nodes, nil }

func (f *fakeDatapath) SetTunnel(t maps.Tunnel) error {
	if f.refuse == "tunnel" {
		return errRefused
	}
	f.tunnel = t
	return nil
}

func (f *fakeDatapath) SetNodes(nodes []maps.Node) error {
	if f.refuse == "nodes" {
		return errRefused
	}
	f.nodes = nodes
	return nil
}

// hostTest is the node of a topology, what its agent is to have, and the agent's hands.
type hostTest struct {
	*testing.T
	*testenv.Topology
	host   *reconcile.Host
	dp     *fakeDatapath
	nodes  []desired.Node
	config desired.Config
	state  *desired.State // of the last sync

	refused []nodestate.Skipped // by the kernel, in the last sync
}

const (
	ownNode    = "node-1"
	deviceName = "ebpfnet0"
)

// newHostTest is a node of a cluster of three: the second is on its link, the third behind a router.
func newHostTest(t *testing.T) *hostTest {
	t.Helper()
	testenv.Require(t, testenv.VXLAN)
	h := &hostTest{T: t, Topology: testenv.NewTopology(t), dp: &fakeDatapath{}, config: desired.Config{Mode: desired.ModeTunnel, Device: deviceName, Port: 4789, VNI: 1}}
	h.nodes = []desired.Node{
		nodeObject(1, testenv.NodeAddr4, testenv.NodeAddr6),
		nodeObject(2, testenv.OutsideAddr4, testenv.OutsideAddr6),
		nodeObject(3, netip.MustParseAddr("203.0.113.3"), netip.MustParseAddr("2001:db8:ff::3")),
	}
	err := h.Node.Do(func() (err error) {
		h.host, err = reconcile.Open(h.dp, deviceName)
		return err
	})
	testenv.Must(t, err)
	t.Cleanup(h.host.Close)
	return h
}

func nodeObject(number int, addrs ...netip.Addr) desired.Node {
	node := desired.Node{
		Name: fmt.Sprintf("node-%d", number), Created: time.Unix(int64(number), 0),
		PodCIDRs: []string{podCIDR4(number).String(), podCIDR6(number).String()},
	}
	for _, addr := range addrs {
		node.Addresses = append(node.Addresses, addr.String())
	}
	return node
}

func podCIDR4(number int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + number>>8), byte(number), 0}), 24)
}

func podCIDR6(number int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf("fd44:%x::/64", number))
}

// sync has the host have what it should, and returns what it has changed.
func (h *hostTest) sync() *reconcile.Changes {
	h.Helper()
	changes, err := h.trySync()
	if err != nil || len(h.refused) > 0 {
		h.Fatalf("sync: %v, refused %v", err, h.refused)
	}
	return changes
}

func (h *hostTest) trySync() (*reconcile.Changes, error) {
	facts, have, err := h.host.Look()
	if err != nil {
		return nil, err
	}
	if h.state, err = desired.Of(h.nodes, ownNode, h.config, facts); err != nil {
		return nil, err
	}
	changes, err := reconcile.Difference(h.state, have)
	if err != nil {
		return nil, err
	}
	h.refused, err = h.host.Apply(changes, h.state, have)
	return changes, err
}

// settle is sync, after which nothing is left to do: the kernel has taken everything as it was meant.
func (h *hostTest) settle(what string) *reconcile.Changes {
	h.Helper()
	changes := h.sync()
	if again := h.sync(); !again.IsEmpty() {
		h.Fatalf("%s: a second sync found %+v, want nothing to change", what, *again)
	}
	return changes
}

func (h *hostTest) ip(args ...string) string {
	h.Helper()
	output, err := h.Node.Run(testenv.Context(h), "ip", args...)
	testenv.Must(h, err)
	return output
}

// ours lists the agent's routes, of both families, as the kernel has them.
func (h *hostTest) ours() string {
	h.Helper()
	return h.ip("route", "show", "proto", "235") + h.ip("-6", "route", "show", "proto", "235")
}

func (h *hostTest) wantRoutes(what string, want ...string) {
	h.Helper()
	var got []string
	for line := range strings.Lines(h.ours()) {
		if !strings.HasPrefix(line, "unreachable ") {
			got = append(got, strings.Join(strings.Fields(line), " "))
		}
	}
	for i, line := range want {
		if i >= len(got) || !strings.HasPrefix(got[i], line) {
			h.Errorf("%s: got routes\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
			return
		}
	}
	if len(got) != len(want) {
		h.Errorf("%s: got routes\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestHostReachesDesiredState finds the kernel's view of each kind of route equal to the desired one.
func TestHostReachesDesiredState(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*desired.Config)
		want   []string
	}{
		{"tunnel over IPv4", func(*desired.Config) {}, []string{
			"10.100.2.0/24 encap ip id 1 src 192.0.2.1 dst 192.0.2.2 ttl 0 tos 0 dev ebpfnet0 scope link src 10.100.1.1",
			"10.100.3.0/24 encap ip id 1 src 192.0.2.1 dst 203.0.113.3 ttl 0 tos 0 dev ebpfnet0 scope link src 10.100.1.1",
			"fd44:2::/64 encap ip id 1 src 192.0.2.1 dst 192.0.2.2 ttl 0 tos 0 dev ebpfnet0 src fd44:1::1 metric 1024",
			"fd44:3::/64 encap ip id 1 src 192.0.2.1 dst 203.0.113.3 ttl 0 tos 0 dev ebpfnet0 src fd44:1::1 metric 1024",
		}},
		{"tunnel over IPv6", func(c *desired.Config) { c.PreferIPv6 = true }, []string{
			"10.100.2.0/24 encap ip6 id 1 src 2001:db8:1::1 dst 2001:db8:1::2 hoplimit 0 tc 0 csum dev ebpfnet0 scope link src 10.100.1.1 mtu lock 1430",
			"10.100.3.0/24 encap ip6 id 1 src 2001:db8:1::1 dst 2001:db8:ff::3 hoplimit 0 tc 0 csum dev ebpfnet0 scope link src 10.100.1.1 mtu lock 1430",
			"fd44:2::/64 encap ip6 id 1 src 2001:db8:1::1 dst 2001:db8:1::2 hoplimit 0 tc 0 csum dev ebpfnet0 src fd44:1::1 metric 1024 mtu lock 1430",
			"fd44:3::/64 encap ip6 id 1 src 2001:db8:1::1 dst 2001:db8:ff::3 hoplimit 0 tc 0 csum dev ebpfnet0 src fd44:1::1 metric 1024 mtu lock 1430",
		}},
		{"direct", func(c *desired.Config) { c.Mode = desired.ModeDirect }, []string{
			"10.100.2.0/24 via 192.0.2.2 dev eth0",
			"fd44:2::/64 via 2001:db8:1::2 dev eth0 metric 1024",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newHostTest(t)
			test.change(&h.config)
			h.settle("first")
			h.wantRoutes("first", test.want...)

			h.config.Mode = desired.ModeDirect
			h.nodes = h.nodes[:1]
			h.settle("alone")
			h.wantRoutes("alone")
			if links := h.ip("-br", "link"); strings.Contains(links, deviceName) {
				t.Errorf("got devices\n%swant no %s", links, deviceName)
			}
		})
	}
}

// TestHostRepairs puts back what others have changed, and nothing else.
func TestHostRepairs(t *testing.T) {
	h := newHostTest(t)
	h.settle("first")
	device, routes := h.ip("-d", "addr", "show", "dev", deviceName), h.ours()
	for _, damage := range []struct {
		name     string
		commands string
		again    bool // the device is made again, so that its index is another
	}{
		{"a route deleted", "route del 10.100.2.0/24", false},
		{"routes flushed", "-6 route flush proto 235", false},
		{"a route of a node that is gone", "route add 10.99.0.0/24 dev lo proto 235", false},
		{"a route changed", "route change 10.100.2.0/24 dev lo scope link proto 235", false},
		{"the device down", "link set ebpfnet0 down", false},
		{"its MTU", "link set ebpfnet0 mtu 1400", false},
		{"its MAC address", "link set ebpfnet0 address 02:00:00:00:00:01", false},
		{"its flag", "link set ebpfnet0 arp on", false},
		{"an address deleted", "addr del 10.100.1.1/32 dev ebpfnet0", false},
		{"an address added", "addr add 10.100.9.1/32 dev ebpfnet0", false},
		{"its addresses flushed", "addr flush dev ebpfnet0", false},
		{"its name", "link set ebpfnet0 down; link set ebpfnet0 name other", true}, // an old kernel renames none that is up
		{"the device deleted", "link del ebpfnet0", true},
	} {
		for command := range strings.SplitSeq(damage.commands, ";") {
			h.ip(strings.Fields(command)...)
		}
		if changes := h.settle(damage.name); changes.IsEmpty() {
			t.Errorf("%s: nothing was changed", damage.name)
		}
		if got := h.ours(); got != routes {
			t.Errorf("%s: got routes\n%swant\n%s", damage.name, got, routes)
		}
		if got := h.ip("-d", "addr", "show", "dev", deviceName); !damage.again && got != device {
			t.Errorf("%s: got device\n%swant\n%s", damage.name, got, device)
		}
		device = h.ip("-d", "addr", "show", "dev", deviceName)
	}
}

// TestHostLeavesOthersAlone neither replaces nor deletes what it has not made, and says what is in its way.
func TestHostLeavesOthersAlone(t *testing.T) {
	h := newHostTest(t)
	h.ip("route", "add", "10.100.2.0/24", "via", "192.0.2.2", "proto", "bird")
	h.ip("route", "add", "10.77.0.0/24", "via", "192.0.2.2")
	h.wantRefused("with a foreign route", "node-2", "10.100.2.0/24", "not ebpfnet's")
	for _, prefix := range []string{"10.100.2.0/24", "10.77.0.0/24"} {
		if got := h.ip("route", "show", prefix); !strings.Contains(got, "via 192.0.2.2") {
			t.Errorf("got %q for %s, want the foreign route", got, prefix)
		}
	}
	if got := h.ip("route", "show", "10.100.3.0/24"); got == "" {
		t.Error("got no route to the third node, want it in spite of the foreign one to the second")
	}
	h.ip("route", "del", "10.100.2.0/24")
	h.settle("without the foreign route")

	h.ip("link", "del", deviceName)
	h.ip("link", "add", deviceName, "type", "bridge")
	if _, err := h.trySync(); err == nil || !strings.Contains(err.Error(), "not ebpfnet's") {
		t.Errorf("with a foreign device: got error %v, want one that says so", err)
	}
	if got := h.ip("-d", "link", "show", deviceName); !strings.Contains(got, "bridge") {
		t.Errorf("got device %s, want the bridge", got)
	}
}

// wantRefused syncs, and wants the kernel to refuse a node's prefix, and nothing else to fail.
func (h *hostTest) wantRefused(what, node, prefix, reason string) {
	h.Helper()
	_, err := h.trySync()
	if err != nil || len(h.refused) != 1 || h.refused[0].Node != node || h.refused[0].Prefix != prefix || !strings.Contains(h.refused[0].Reason, reason) {
		h.Errorf("%s: got %v refused (%v), want %s of %s: %s", what, h.refused, err, prefix, node, reason)
	}
}

// TestHostRefusesOne serves the other nodes when one has an address that the kernel takes for no gateway.
func TestHostRefusesOne(t *testing.T) {
	h := newHostTest(t)
	h.config.Mode = desired.ModeDirect
	h.ip("addr", "add", "192.0.2.11/24", "broadcast", "192.0.2.77", "dev", "eth0")
	wrong := nodeObject(4, netip.MustParseAddr("192.0.2.77"))
	wrong.PodCIDRs = wrong.PodCIDRs[:1]
	h.nodes = append([]desired.Node{wrong}, h.nodes...)
	h.wantRefused("a broadcast address", "node-4", "10.100.4.0/24", "invalid argument")
	h.wantRoutes("a broadcast address", "10.100.2.0/24 via 192.0.2.2 dev eth0", "fd44:2::/64 via 2001:db8:1::2 dev eth0")
	h.nodes[0].Addresses = []string{"192.0.2.44"}
	h.settle("another gateway")
}

// TestHostWithoutIPv6 has disabled it, among nodes of both families.
func TestHostWithoutIPv6(t *testing.T) {
	h := newHostTest(t)
	testenv.Must(t, h.Node.SetSysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	testenv.Must(t, h.Node.SetSysctl("net/ipv6/conf/default/disable_ipv6", "1"))
	h.nodes[0].PodCIDRs = h.nodes[0].PodCIDRs[:1]
	h.nodes[0].Addresses = h.nodes[0].Addresses[:1]
	h.settle("first")
	h.wantRoutes("first", "10.100.2.0/24 encap ip id 1", "10.100.3.0/24 encap ip id 1")
}

// TestHostContinues continues where an agent has ended. The device is down until the datapath knows of it, because nobody
// checks before what it receives, and no route is there before the entries of nodes, because packets would be masqueraded.
func TestHostContinues(t *testing.T) {
	for _, refuse := range []string{"tunnel", "nodes"} {
		h := newHostTest(t)
		h.dp.refuse = refuse
		for range 2 {
			if _, err := h.trySync(); !errors.Is(err, errRefused) {
				t.Errorf("without %s: got error %v, want %v", refuse, err, errRefused)
			}
		}
		isUp := strings.Contains(h.ip("link", "show", "up", "dev", deviceName), deviceName)
		if isUp != (refuse != "tunnel") {
			t.Errorf("without %s: the device is up: %v", refuse, isUp)
		}
		h.wantRoutes("without " + refuse)
		h.dp.refuse = ""
		if changes := h.settle("then"); len(changes.Add) != 4+2 {
			t.Errorf("without %s, then: got %+v, want four routes to nodes added, and two unreachable ones", refuse, *changes)
		}

		h.dp.refuse = refuse
		h.config.Mode, h.nodes = desired.ModeDirect, h.nodes[:1]
		if _, err := h.trySync(); !errors.Is(err, errRefused) {
			t.Errorf("away, without %s: got error %v, want %v", refuse, err, errRefused)
		}
		h.dp.refuse = ""
		h.settle("away")
		h.wantRoutes("away")
	}
}

// TestHostFinishesDevice continues where an agent was killed that had only added the device.
func TestHostFinishesDevice(t *testing.T) {
	h := newHostTest(t)
	h.settle("first")
	device := h.ip("-d", "link", "show", deviceName)
	h.ip("link", "del", deviceName)
	h.ip("link", "add", deviceName, "address", h.state.Device.MAC, "type", "vxlan", "external", "dstport", "4789")
	h.settle("only added")
	if got := h.ip("-d", "link", "show", deviceName); withoutIndex(got) != withoutIndex(device) {
		t.Errorf("only added: got device\n%swant\n%s", got, device)
	}
	h.wantRoutes("only added", "10.100.2.0/24 encap", "10.100.3.0/24 encap", "fd44:2::/64 encap", "fd44:3::/64 encap")
}

// TestHostSaysWhatIsInUse names the port of the tunnel that somebody else has.
func TestHostSaysWhatIsInUse(t *testing.T) {
	h := newHostTest(t)
	var socket *net.UDPConn
	err := h.Node.Do(func() (err error) {
		socket, err = net.ListenUDP("udp4", &net.UDPAddr{Port: h.config.Port})
		return err
	})
	testenv.Must(t, err)
	defer socket.Close()
	for range 2 {
		if _, err := h.trySync(); err == nil || !strings.Contains(err.Error(), "UDP port 4789 is in use") {
			t.Errorf("got error %v, want the port", err)
		}
	}
	socket.Close()
	h.settle("free again")
}

// withoutIndex returns what ip shows of a device but the number that it begins with.
func withoutIndex(device string) string {
	_, rest, _ := strings.Cut(device, ": ")
	return rest
}

// TestHostFollowsNodes changes what has changed: in one step where a route stays, so that no packet finds none.
func TestHostFollowsNodes(t *testing.T) {
	h := newHostTest(t)
	h.settle("first")

	h.nodes[1].Addresses = []string{"192.0.2.22"}
	changes := h.settle("another address")
	if len(changes.Replace) != 2 || len(changes.Add)+len(changes.Delete) != 0 {
		t.Errorf("another address: got %+v, want two routes replaced", *changes)
	}
	if got := h.ip("route", "show", "10.100.2.0/24"); !strings.Contains(got, "dst 192.0.2.22 ") {
		t.Errorf("another address: got route %s, want the new address", got)
	}

	h.nodes[1].PodCIDRs = []string{podCIDR4(7).String()}
	h.nodes = slices.Delete(h.nodes, 2, 3)
	h.settle("back with another prefix, and a node gone")
	h.wantRoutes("back with another prefix, and a node gone", "10.100.7.0/24 encap ip id 1 src 192.0.2.1 dst 192.0.2.22")

	h.config.Port = 8472
	if changes := h.settle("another port"); !changes.CreateDevice || !changes.DeleteDevice {
		t.Errorf("another port: got %+v, want another device", *changes)
	}
	h.wantRoutes("another port", "10.100.7.0/24 encap")
	if got := h.ip("-d", "link", "show", deviceName); !strings.Contains(got, "dstport 8472 ") {
		t.Errorf("got device %s, want port 8472", got)
	}

	h.ip("addr", "del", "192.0.2.1/24", "dev", "eth0")
	h.settle("its own address gone")
	h.wantRoutes("its own address gone", "10.100.7.0/24 encap ip id 1 src 0.0.0.0 dst 192.0.2.22")
	h.ip("addr", "add", "192.0.2.11/24", "dev", "eth0")
	h.nodes[0].Addresses = []string{"192.0.2.11"}
	h.settle("another address of its own")
	h.wantRoutes("another address of its own", "10.100.7.0/24 encap ip id 1 src 192.0.2.11 dst 192.0.2.22")

	h.ip("link", "set", "eth0", "mtu", "1400")
	h.settle("a smaller MTU")
	if got := h.ip("link", "show", deviceName); !strings.Contains(got, "mtu 1350 ") {
		t.Errorf("a smaller MTU: got device %s, want 1350", got)
	}
}

// TestHostOfManyNodes takes a node of each prefix, and finds them again.
func TestHostOfManyNodes(t *testing.T) {
	const many = 1000 // 5,000 take 2 s: the kernel compares each IPv4 route with all others of a device

	h := newHostTest(t)
	for number := 4; number <= many; number++ {
		h.nodes = append(h.nodes, nodeObject(number, netip.AddrFrom4([4]byte{203, 0, byte(number >> 8), byte(number)})))
	}
	if changes := h.settle("first"); len(changes.Add) != 2*many { // with its own unreachable ones
		t.Errorf("got %d routes added, want %d", len(changes.Add), 2*many)
	}
	h.ip("link", "del", deviceName)
	if changes := h.settle("device deleted"); len(changes.Add) != 2*(many-1) {
		t.Errorf("got %d routes added again, want %d", len(changes.Add), 2*(many-1))
	}
	h.nodes = h.nodes[:1]
	if changes := h.settle("all gone"); len(changes.Delete) != 2*(many-1) {
		t.Errorf("got %d routes deleted, want %d", len(changes.Delete), 2*(many-1))
	}
}
