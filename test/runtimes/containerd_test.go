package runtimes

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	containerdDir    = "/run/containerd"
	containerdSocket = containerdDir + "/containerd.sock"
)

// release is a containerd that users have.
type release struct {
	version string
	config  string // beside what both have
	program func(t *testing.T, name string) (file string)
}

// debian is Debian 12's.
var debian = release{"1.6", `
version = 2
[plugins.'io.containerd.internal.v1.opt']
path = "` + containerdDir + `/opt"
[plugins.'io.containerd.grpc.v1.cri']
sandbox_image = "` + image + `"
restrict_oom_score_adj = true # root of a container may not lower it
[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]
BinaryName = "` + binDir + `/runc"
`, func(_ *testing.T, name string) string { return "../../bin/debian/usr/bin/" + name }}

var newest = release{"2", `
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "` + image + `"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "` + binDir + `/runc"
`, func(t *testing.T, name string) string {
	return testenv.Build(t, "github.com/containerd/containerd/v2/cmd/"+name)
}}

const containerdConfig = `
root = "` + containerdDir + `/root"
state = "` + containerdDir + `/state"
[grpc]
address = "` + containerdSocket + `"
`

// runc is crun that leaves the cgroups of the host alone, where runc would find a container's processes. Debian 12's
// crun knows no newer version of the OCI's bundles.
const runc = `#!/bin/sh
case " $* " in *" ps --format json "*)
	crun $(echo "$*" | sed 's/ ps --format json / state /') | sed -n 's/.*"pid": \([0-9]*\).*/[\1]/p'
	exit
esac
for word; do
	[ ! -f "$word/config.json" ] || sed -i 's/"ociVersion":"[^"]*"/"ociVersion":"1.0.2"/' "$word/config.json"
done
exec crun --cgroup-manager=disabled "$@"
`

// containerd is a node with containerd, as the kubelet sees it.
type containerd struct {
	*machine
	cri.RuntimeServiceClient
	images cri.ImageServiceClient
}

func newContainerd(t *testing.T, r release, conflist []byte) containerd {
	t.Helper()
	m := newMachine(t, conflist)
	for _, program := range []string{"containerd", "containerd-shim-runc-v2", "ctr"} {
		m.install(t, r.program(t, program), binDir+"/"+program)
	}
	m.installPlugins(t, "main/loopback") // which CRI calls beside the list
	return startContainerd(t, m, r)
}

// startContainerd starts containerd on a machine that has its programs.
func startContainerd(t *testing.T, m *machine, r release) containerd {
	t.Helper()
	head, tail, _ := strings.Cut(r.config, "[") // keys come before tables
	m.write(t, containerdDir+"/config.toml", []byte(head+containerdConfig+"["+tail))
	m.write(t, binDir+"/runc", []byte(runc))
	m.write(t, "/run/image.tar", ociImage(t))

	connection, err := grpc.NewClient("unix://"+m.path(containerdSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	c := containerd{m, cri.NewRuntimeServiceClient(connection), cri.NewImageServiceClient(connection)}
	c.start(t)
	c.run(t, "ctr", "--namespace", "k8s.io", "images", "import", "/run/image.tar")
	testenv.Eventually(t, "the image", func() error {
		status, err := c.images.ImageStatus(testenv.Context(t), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image}})
		if err == nil && status.Image == nil {
			err = fmt.Errorf("no image %s", image)
		}
		return err
	})
	return c
}

// start starts containerd and waits until it has read its network.
func (c containerd) start(t *testing.T) {
	t.Helper()
	const start = "echo $$ >" + containerdDir + "/pid; exec containerd --config " + containerdDir + "/config.toml"
	c.startDaemon(t, "sh", "-c", start)
	testenv.Eventually(t, "containerd", func() error {
		condition, err := c.network(t)
		if err == nil && strings.Contains(condition.Message, "cni plugin not initialized") {
			err = fmt.Errorf("network: %s", condition.Message)
		}
		return err
	})
}

// kill kills containerd as the kernel does it for want of memory. Its containers go on.
func (c containerd) kill(t *testing.T) {
	t.Helper()
	c.run(t, "sh", "-c", "kill -KILL $(cat "+containerdDir+"/pid)")
	testenv.Eventually(t, "the end of containerd", func() error {
		if output, err := c.command(testenv.Context(t), "sh", "-c", "! kill -0 $(cat "+containerdDir+"/pid)").CombinedOutput(); err != nil {
			return fmt.Errorf("it is there: %w: %s", err, output)
		}
		return nil
	})
}

// network returns the condition of the network that the kubelet reports for its node.
func (c containerd) network(t *testing.T) (*cri.RuntimeCondition, error) {
	t.Helper()
	response, err := c.Status(testenv.Context(t), &cri.StatusRequest{})
	if err != nil {
		return nil, err
	}
	for _, condition := range response.Status.Conditions {
		if condition.Type == cri.NetworkReady {
			return condition, nil
		}
	}
	return nil, fmt.Errorf("got status %v, want a condition %s", response.Status, cri.NetworkReady)
}

// eachContainerd runs a test under each release, with the list that users copy.
func eachContainerd(t *testing.T, test func(t *testing.T, c containerd)) {
	for _, r := range []release{debian, newest} {
		t.Run(r.version, func(t *testing.T) { test(t, newContainerd(t, r, example(t, "example.conflist"))) })
	}
}
