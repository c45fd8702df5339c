package scenario

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// podsConflist is the network of most stories, and of README.md.
const podsConflist = `{
	"cniVersion": "1.0.0",
	"name": "pods",
	"plugins": [{
		"type": "ebpfnet",
		"ipMasq": true,
		"capabilities": {"portMappings": true},
		"ipam": {
			"type": "host-local",
			"ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
			"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
		}
	}]
}`

// allVerbsConflist is that network in a version that has STATUS and GC.
var allVerbsConflist = strings.Replace(podsConflist, "1.0.0", "1.1.0", 1)

var (
	podSubnet4 = netip.MustParsePrefix("10.88.0.0/24")
	podSubnet6 = netip.MustParsePrefix("fd00:88::/64")
)

// network is a node with a network of pods, and the world around it.
type network struct {
	*testenv.Topology
	*testenv.Runtime
}

// newNetwork makes a fresh node for the network that most stories use.
func newNetwork(t *testing.T) *network {
	t.Helper()
	return newNetworkOf(t, podsConflist)
}

// newNetworkOf makes a fresh node for a network. The end of the test checks that its
// pods left nothing behind, and unloads the datapath.
func newNetworkOf(t *testing.T, conflist string) *network {
	t.Helper()
	const first = `"plugins": [{
		"type": "ebpfnet",`
	if *fastPath != "" && !strings.Contains(conflist, `"fastPath"`) {
		conflist = strings.Replace(conflist, first, first+` "fastPath": "`+*fastPath+`",`, 1)
	}
	topology := testenv.NewTopology(t)
	plugin := testenv.Build(t, "./cmd/ebpfnet")
	n := &network{topology, testenv.NewRuntime(t, topology.Node, []byte(conflist), filepath.Dir(plugin))}
	t.Cleanup(func() { n.unload(t) })
	t.Cleanup(func() { n.checkNothingLeft(t) })
	return n
}

// node is where the plugin runs. Both embedded structs have it.
func (n *network) node() *testenv.Namespace { return n.Topology.Node }

// withDatapath opens the node's datapath as the plugin does.
func (n *network) withDatapath(t *testing.T, use func(*loader.Datapath)) {
	t.Helper()
	err := n.node().Do(func() error {
		datapath, err := loader.OpenLoaded()
		if err != nil {
			return err
		}
		defer datapath.Close()
		use(datapath)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// mapping is an element of the portMappings capability.
type mapping struct {
	HostPort      uint16 `json:"hostPort"`
	ContainerPort uint16 `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP,omitempty"`
}

func portMappings(mappings ...mapping) map[string]any {
	return map[string]any{"portMappings": mappings}
}

// mapBoth maps a host port for TCP and for UDP.
func mapBoth(hostPort, containerPort uint16) map[string]any {
	return portMappings(
		mapping{HostPort: hostPort, ContainerPort: containerPort, Protocol: "tcp"},
		mapping{HostPort: hostPort, ContainerPort: containerPort, Protocol: "udp"},
	)
}

// family names the same things in IPv4 and in IPv6.
type family struct {
	name                      string
	node, outside             netip.Addr
	secondNode, secondOutside netip.Addr
	router, far               netip.Addr
	gateway                   netip.Addr
	podSubnet                 netip.Prefix
	pod                       func(*testenv.Pod) netip.Addr
}

var families = []family{
	{
		name: "IPv4",
		node: testenv.NodeAddr4, outside: testenv.OutsideAddr4,
		secondNode: testenv.SecondNodeAddr4, secondOutside: testenv.SecondOutsideAddr4,
		router: testenv.RouterAddr4, far: testenv.FarAddr4,
		gateway: podSubnet4.Addr().Next(), podSubnet: podSubnet4, pod: (*testenv.Pod).Addr4,
	},
	{
		name: "IPv6",
		node: testenv.NodeAddr6, outside: testenv.OutsideAddr6,
		secondNode: testenv.SecondNodeAddr6, secondOutside: testenv.SecondOutsideAddr6,
		router: testenv.RouterAddr6, far: testenv.FarAddr6,
		gateway: podSubnet6.Addr().Next(), podSubnet: podSubnet6, pod: (*testenv.Pod).Addr6,
	},
}

// inEachFamily tells a story in IPv4 and in IPv6.
func inEachFamily(t *testing.T, story func(*testing.T, family)) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) { story(t, f) })
	}
}

// byEachProtocol tells a story in both families, by TCP and by UDP.
func byEachProtocol(t *testing.T, story func(t *testing.T, f family, protocol string)) {
	inEachFamily(t, func(t *testing.T, f family) {
		for _, protocol := range []string{"tcp", "udp"} {
			t.Run(protocol, func(t *testing.T) { story(t, f, protocol) })
		}
	})
}
