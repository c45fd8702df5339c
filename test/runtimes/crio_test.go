package runtimes

import (
	"errors"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	crioDir     = "/run/crio"
	crioStorage = crioDir + "/storage"
	crioRun     = crioDir + "/run"
)

const crioConfig = `
[crio]
root = "` + crioStorage + `"
runroot = "` + crioRun + `"
storage_driver = "vfs"
version_file = "` + crioDir + `/version"
clean_shutdown_file = "` + crioDir + `/clean.shutdown"
internal_wipe = false
[crio.runtime]
cgroup_manager = "cgroupfs"
apparmor_profile = "unconfined"
pinns_path = "` + binDir + `/pinns"
default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "` + binDir + `/runc"
runtime_root = "` + crioDir + `/runc"
monitor_cgroup = "pod"
[crio.image]
pause_image = "` + image + `"
[crio.nri]
enable_nri = false
`

// pinns makes the namespaces of a pod, as CRI-O's program of this name, which is not in Go.
const pinns = `#!/bin/sh
while [ $# -gt 0 ]; do
	case $1 in
	-d) dir=$2; shift ;;
	-f) name=$2; shift ;;
	--net|--ipc|--uts)
		file=$dir/${1#--}ns/$name
		touch $file
		namespaces="$namespaces $1=$file" ;;
	*) echo "no such option: $1"; exit 1 ;;
	esac
	shift
done
exec unshare $namespaces true
`

// crio is a node with CRI-O. It gives no host ports to plugins: it has rules of its own for them.
type crio struct{ node }

func newCRIO(t *testing.T, conflist []byte) crio {
	t.Helper()
	m := newMachine(t, conflist)
	m.install(t, testenv.Build(t, "github.com/cri-o/cri-o/cmd/crio"), binDir+"/crio")
	m.write(t, binDir+"/runc", []byte(runc))
	m.write(t, binDir+"/pinns", []byte(pinns))
	m.write(t, crioDir+"/crio.conf", []byte(crioConfig))
	m.write(t, "/run/image.tar", ociImage(t))
	m.run(t, "podman", "--root", crioStorage, "--runroot", crioRun, "--storage-driver", "vfs", "load", "--input", "/run/image.tar")

	c := crio{newNode(t, m, daemon{
		command:    "crio --config " + crioDir + "/crio.conf --config-dir ''",
		socket:     crioDir + "/crio.sock",
		containers: crioRun + "/vfs-containers/*/userdata/pidfile",
	})}
	c.start(t)
	c.waitForImage(t)
	return c
}

// TestCRIOStatus starts CRI-O on a damaged node, which gets ready by the repair alone. Then it has called GC: an
// attachment that neither CRI-O nor libcni's cache knows is gone.
func TestCRIOStatus(t *testing.T) {
	c := newCRIO(t, example(t, "examples/containerd.conflist"))
	c.install(t, testenv.Build(t, "github.com/containernetworking/cni/cnitool"), binDir+"/cnitool")
	c.env = append(c.env, "CNI_PATH="+pluginDir, "NETCONFPATH="+configDir)
	before := c.state(t)
	c.kill(t)
	c.run(t, "sh", "-c", `
		ip netns add lost && cnitool add pods /run/netns/lost && ip netns del lost && rm -r /var/lib/cni/results
		mount -o remount,ro /sys/fs/bpf`)
	c.start(t)
	if network, err := c.network(t); err != nil || network.Status || !strings.Contains(network.Message, "read-only file system") {
		t.Errorf("without maps: got %v, %v; want not ready", network, err)
	}
	c.run(t, "mount", "-o", "remount,rw", "/sys/fs/bpf")
	testenv.Eventually(t, "the network", func() error {
		network, err := c.network(t)
		if err == nil && !network.Status {
			err = errors.New(network.Message)
		}
		return err
	})
	c.wantState(t, before)
}
