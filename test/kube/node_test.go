package kube

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// node is a machine with containerd, a kubelet and kube-proxy.
type node struct {
	*machine
	control                    *controlPlane
	addrs                      []netip.Addr // of each family
	containerd, kubelet, proxy *daemon
}

const containerdConfig = `
version = 3
oom_score = 0
[grpc]
address = "/run/containerd/containerd.sock"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "` + pauseImage + `"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
use_internal_loopback = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "runc"
`

// kubeletConfig is for a host whose disk, memory and kernel are others' business.
const kubeletConfig = `
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
enforceNodeAllocatable: []
evictionHard: {memory.available: 1Mi, nodefs.available: 0%, imagefs.available: 0%}
imageGCHighThresholdPercent: 100
resolvConf: /run/kube/resolv.conf
nodeStatusReportFrequency: 1m
`

// Files of a node's programs.
const (
	kubeconfigPath      = "/run/kube/kubeconfig"
	proxyKubeconfigPath = "/run/kube/proxy.kubeconfig"
	kubeletConfigPath   = "/run/kube/kubelet.yaml"
	containerdPath      = "/run/kube/containerd.toml"
	imagesPath          = "/run/kube/images.tar"
)

// newNode makes a machine with the files of its programs. It has no addresses yet.
func newNode(t *testing.T, control *controlPlane, name string) *node {
	t.Helper()
	n := &node{machine: newMachine(t, name), control: control}
	n.write(kubeconfigPath, control.creds.user(t, "system:node:"+name, "system:nodes"))
	n.write(proxyKubeconfigPath, control.creds.user(t, "system:kube-proxy", ""))
	n.write(kubeletConfigPath, kubeletConfig+fmt.Sprintf("clusterDNS: [%q]\nclusterDomain: %s\n", apiAddr(), clusterDomain))
	n.write(containerdPath, containerdConfig)
	n.write("/run/kube/resolv.conf", "")
	return n
}

// start starts a program that ends with the node, and is missed if it ends earlier.
func (n *node) start(name string, args ...string) *daemon {
	n.t.Helper()
	d := n.machine.start(binary(n.t, name), args...)
	n.control.started = append(n.control.started, d)
	return d
}

// startContainerd starts it and waits until it answers.
func (n *node) startContainerd() {
	n.t.Helper()
	n.containerd = n.start("containerd", "--config="+containerdPath)
	n.control.eventually("containerd of "+n.Name, func() error {
		output, err := n.command(testenv.Context(n.t), binary(n.t, "ctr"), "version").CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, output)
		}
		return err
	})
}

// importImages gives containerd the images of an archive.
func (n *node) importImages(archive []byte) {
	n.t.Helper()
	testenv.Must(n.t, os.WriteFile(n.path(imagesPath), archive, 0o600))
	n.run(binary(n.t, "ctr"), "--namespace=k8s.io", "images", "import", "--local", imagesPath)
}

// startKubelet starts the kubelet, which registers the node.
func (n *node) startKubelet() {
	n.t.Helper()
	var addrs []string
	for _, addr := range n.addrs {
		addrs = append(addrs, addr.String())
	}
	n.kubelet = n.start("kubelet", "--config="+kubeletConfigPath, "--kubeconfig="+kubeconfigPath, "--hostname-override="+n.Name,
		"--node-ip="+strings.Join(addrs, ","), "--v=2")
}

// startProxy starts kube-proxy.
func (n *node) startProxy() {
	n.t.Helper()
	n.proxy = n.start("kube-proxy", "--kubeconfig="+proxyKubeconfigPath, "--hostname-override="+n.Name, "--proxy-mode="+*proxyMode,
		"--cluster-cidr="+podPrefixes(), "--oom-score-adj=0", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0",
		"--conntrack-tcp-timeout-close-wait=0", "--iptables-localhost-nodeports=false")
}
