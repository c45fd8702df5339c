package runtimes

import (
	"bytes"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func (c containerd) wantReady(t *testing.T) {
	t.Helper()
	if got := c.condition(t); !got.Status {
		t.Errorf("got not ready: %s, want ready", got.Message)
	}
}

func (c containerd) wantNotReady(t *testing.T, reason string) {
	t.Helper()
	if got := c.condition(t); got.Status || !strings.Contains(got.Message, reason) {
		t.Errorf("got ready %t, %q; want a message with %q", got.Status, got.Message, reason)
	}
}

func (c containerd) condition(t *testing.T) *cri.RuntimeCondition {
	t.Helper()
	condition, err := c.network(t)
	testenv.Must(t, err)
	return condition
}

// TestContainerdStatus damages a node. containerd reports why the node is not ready, and after the repair that it is:
// nobody restarts anything.
func TestContainerdStatus(t *testing.T) {
	conflist := bytes.ReplaceAll(example(t, "examples/containerd.conflist"), []byte("10.84.0.0/16"), []byte("10.84.0.0/30"))
	c := newContainerd(t, newest, conflist)
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
			"no free address: range set 0 (10.84.0.1-10.84.0.2) in /var/lib/cni/networks/pods",
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
