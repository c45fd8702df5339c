package runtimes

import (
	"bytes"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const containerdSocket = "/run/containerd/containerd.sock"

const containerdConfig = `
version = 3
root = "/run/containerd/root"
state = "/run/containerd/state"
[grpc]
address = "` + containerdSocket + `"
[plugins.'io.containerd.cri.v1.images']
snapshotter = "native"
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["` + pluginDir + `"]
conf_dir = "` + configDir + `"
`

// containerd is containerd 2, as the kubelet sees it.
type containerd struct {
	*machine
	cri.RuntimeServiceClient
}

func newContainerd(t *testing.T, conflist []byte) containerd {
	t.Helper()
	m := newMachine(t, conflist)
	m.write(t, "/run/containerd/config.toml", []byte(containerdConfig))
	m.install(t, testenv.Build(t, "github.com/containerd/containerd/v2/cmd/containerd"), binDir+"/containerd")
	m.startDaemon(t, "containerd", "--config", "/run/containerd/config.toml")

	connection, err := grpc.NewClient("unix://"+m.path(containerdSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	c := containerd{m, cri.NewRuntimeServiceClient(connection)}
	testenv.Eventually(t, "containerd's answer", func() error {
		_, err := c.Version(testenv.Context(t), &cri.VersionRequest{})
		return err
	})
	return c
}

// network returns the condition of the network that the kubelet reports for its node.
func (c containerd) network(t *testing.T) *cri.RuntimeCondition {
	t.Helper()
	response, err := c.Status(testenv.Context(t), &cri.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, condition := range response.Status.Conditions {
		if condition.Type == cri.NetworkReady {
			return condition
		}
	}
	t.Fatalf("got status %v, want a condition %s", response.Status, cri.NetworkReady)
	return nil
}

func (c containerd) wantReady(t *testing.T) {
	t.Helper()
	if got := c.network(t); !got.Status {
		t.Errorf("got not ready: %s, want ready", got.Message)
	}
}

func (c containerd) wantNotReady(t *testing.T, reason string) {
	t.Helper()
	if got := c.network(t); got.Status || !strings.Contains(got.Message, reason) {
		t.Errorf("got ready %t, %q; want a message with %q", got.Status, got.Message, reason)
	}
}

// TestContainerdStatus damages a node. containerd reports why the node is not ready, and after the repair that it is:
// nobody restarts anything.
func TestContainerdStatus(t *testing.T) {
	conflist := bytes.ReplaceAll(example(t, "examples/containerd.conflist"), []byte("10.88.0.0/16"), []byte("10.88.0.0/30"))
	c := newContainerd(t, conflist)
	c.install(t, testenv.Build(t, "github.com/containernetworking/cni/cnitool"), binDir+"/cnitool")
	c.env = append(c.env, "CNI_PATH="+pluginDir, "NETCONFPATH="+configDir)
	c.run(t, "ip", "netns", "add", "pod")
	c.wantReady(t)
	for _, test := range []struct {
		what, damage, reason, repair string
	}{
		{
			"range without an address",
			"cnitool add pods /run/netns/pod",
			"no free address: range set 0 (10.88.0.1-10.88.0.2) in /var/lib/cni/networks/pods",
			"cnitool del pods /run/netns/pod",
		},
		{
			"read-only bpffs",
			"mount -o remount,ro /sys/fs/bpf",
			"maps/devices: read-only file system",
			"mount -o remount,rw /sys/fs/bpf",
		},
		{
			"no datapath",
			"ebpfnetctl unload --yes && mount -o remount,ro /sys/fs/bpf",
			"load the datapath: create a directory of pins",
			"mount -o remount,rw /sys/fs/bpf",
		},
		{
			"no bpffs",
			"umount /sys/fs/bpf && mount -t tmpfs tmpfs /sys/fs",
			"load the datapath: this host cannot run ebpfnet: /sys/fs/bpf: no such file or directory",
			"umount /sys/fs",
		},
	} {
		t.Run(test.what, func(t *testing.T) {
			c.run(t, "sh", "-c", test.damage)
			c.wantNotReady(t, test.reason)
			c.run(t, "sh", "-c", test.repair)
			c.wantReady(t)
		})
	}
}
