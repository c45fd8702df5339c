package scenario

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// podsConflist is the network of most tests.
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

// allVerbsConflist is podsConflist in a CNI version that has STATUS and GC.
var allVerbsConflist = allVerbs(podsConflist)

// allVerbs returns conflist in a CNI version that has STATUS and GC.
func allVerbs(conflist string) string {
	return strings.Replace(conflist, `"1.0.0"`, `"1.1.0"`, 1)
}

// withKeys returns podsConflist with these keys in place of ipMasq.
func withKeys(keys string) string {
	return strings.Replace(podsConflist, `"ipMasq": true,`, keys+",", 1)
}

// autoConflist is allVerbsConflist with fastPath auto, whatever the flag says: for tests whose packets must reach the
// host's stack, or a program behind ours, which always bypasses.
var autoConflist = allVerbs(withKeys(`"ipMasq": true, "fastPath": "auto"`))

// conflistOf returns a network "pods" of these plugins.
func conflistOf(plugins ...string) string {
	return `{"cniVersion": "1.0.0", "name": "pods", "plugins": [` + strings.Join(plugins, ", ") + `]}`
}

// network is a node with a network of pods, and the hosts around it.
type network struct {
	*testenv.Topology
	*testenv.Runtime
}

// newNetwork makes a fresh node with podsConflist.
func newNetwork(t *testing.T) *network {
	t.Helper()
	return newNetworkWith(t, podsConflist)
}

// newNetworkWith makes a fresh node. The end of the test checks that its pods left nothing behind, and
// leaves the datapath, without entries, to another test's node.
func newNetworkWith(t *testing.T, conflist string) *network {
	t.Helper()
	const first = `"plugins": [{
		"type": "ebpfnet",`
	if *fastPath != "" && !strings.Contains(conflist, `"fastPath"`) {
		conflist = strings.Replace(conflist, first, first+` "fastPath": "`+*fastPath+`",`, 1)
	}
	topology := testenv.NewTopology(t)
	plugin := testenv.Build(t, "./cmd/ebpfnet")
	n := &network{topology, testenv.NewRuntime(t, topology.Node, []byte(conflist), filepath.Dir(plugin))}
	t.Cleanup(func() {
		n.wantNothingLeft(t)
		if !t.Failed() {
			testenv.Recycle(t, n.node())
		}
		n.unload(t)
	})
	return n
}

// node is where the plugin runs. Both embedded structs have it.
func (n *network) node() *testenv.Namespace { return n.Topology.Node }

// wantNothingLeft fails the test for everything that pods have left on the node.
func (n *network) wantNothingLeft(t *testing.T) {
	t.Helper()
	left, err := testenv.Leftovers(n.node())
	testenv.NoError(t, err)
	for _, thing := range left {
		t.Errorf("left behind: %s", thing)
	}
}

// unload removes the datapath, and the state that nodes share.
func (n *network) unload(t *testing.T) {
	t.Helper()
	for _, dir := range []string{loader.Root, record.DefaultDir, filepath.Join(testenv.ReservationDir, n.Network())} {
		testenv.NoError(t, os.RemoveAll(dir))
	}
}

// withDatapath opens the node's datapath as the plugin does.
func (n *network) withDatapath(t *testing.T, use func(*loader.Datapath)) {
	t.Helper()
	testenv.Must(t, n.node().WithDatapath(func(datapath *loader.Datapath) error {
		use(datapath)
		return nil
	}))
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

// forEachFamily runs a subtest for IPv4 and one for IPv6.
func forEachFamily(t *testing.T, test func(*testing.T, testenv.Family)) {
	for _, f := range testenv.Families {
		t.Run(f.Name, func(t *testing.T) { test(t, f) })
	}
}

// forEachProtocol runs a subtest for TCP and one for UDP, in each family.
func forEachProtocol(t *testing.T, test func(t *testing.T, f testenv.Family, protocol string)) {
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, protocol := range []string{"tcp", "udp"} {
			t.Run(protocol, func(t *testing.T) { test(t, f, protocol) })
		}
	})
}
