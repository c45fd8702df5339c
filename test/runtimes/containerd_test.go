package runtimes

import (
	"net/netip"
	"strings"
	"testing"

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
	[ ! -f "$word/config.json" ] || sed -i 's/"ociVersion": *"[^"]*"/"ociVersion":"1.0.2"/' "$word/config.json"
done
exec crun --cgroup-manager=disabled "$@"
`

// containerd is a node with containerd.
type containerd struct{ node }

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

	c := containerd{newNode(t, m, daemon{
		command:    "containerd --config " + containerdDir + "/config.toml",
		socket:     containerdSocket,
		containers: containerdDir + "/state/io.containerd.runtime.v2.task/k8s.io/*/init.pid",
		local:      []string{"127.0.0.1"},
	})}
	c.start(t)
	c.run(t, "ctr", "--namespace", "k8s.io", "images", "import", "/run/image.tar")
	c.waitForImage(t)
	return c
}

// eachContainerd runs a test under each release, with the list that users copy.
func eachContainerd(t *testing.T, test func(t *testing.T, c containerd)) {
	for _, r := range []release{debian, newest} {
		t.Run(r.version, func(t *testing.T) { test(t, newContainerd(t, r, example(t, "example.conflist"))) })
	}
}

// TestContainerdCtr runs a container by containerd's own client, whose calls have the namespace of a process, and none
// at the end.
func TestContainerdCtr(t *testing.T) {
	eachContainerd(t, func(t *testing.T, c containerd) {
		before := c.state(t)
		server := testenv.ServeHTTP(t, c.Outside, netip.AddrPortFrom(testenv.OutsideAddr4, 0))
		got := c.run(t, "ctr", "--namespace", "k8s.io", "run", "--rm", "--cni", "--runc-binary", binDir+"/runc", image, "client",
			"/bin/busybox", "wget", "-q", "-O", "-", "http://"+server.Addr.String()+"/")
		if !strings.HasPrefix(got, testenv.NodeAddr4.String()+":") {
			t.Errorf("client that the server sees: got %s, want the node", got)
		}
		c.wantState(t, before)
	})
}
