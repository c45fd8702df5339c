// Package kube runs Kubernetes itself with ebpfnet: etcd, an API server, its controllers and three nodes with containerd,
// kubelet and kube-proxy, on one machine and in namespaces of their own.
//
// It is a module of its own, so that Kubernetes' dependencies are not the other tests'. All programs are tools of go.mod:
// `make cluster` builds them from their modules, also those in the images, and runs TestAgents (agents as processes, Node
// objects without kubelets) and TestKubernetes (everything); `make cluster-e2e` runs TestE2E. k8s.io/kubernetes wants the
// other modules of its repository beside it; the replace lines give them the version that its own number stands for.
//
// machine_test.go has the namespaces and processes of a host, cgroup_test.go its cgroups, control_test.go the control
// plane, node_test.go what runs on a node, image_test.go the images, network_test.go the addresses, cluster_test.go the
// links between nodes.
//
// A killed run leaves empty cgroups node-1 to node-3, which the next one removes; nothing else.
package kube

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var (
	logDir    = flag.String("logs", "", "keep the logs of all programs in `DIR`")
	proxyMode = flag.String("proxy-mode", "nftables", "kube-proxy's `MODE`")
	agentMode = flag.String("mode", "tunnel", "the agent's `MODE`: tunnel or auto")
	ipFamily  = flag.String("families", "IPv4,IPv6", "`FAMILIES` of nodes, pods and services; the API server has the first")
	e2eFocus  = flag.String("e2e", "", "`EXPRESSION` of those of Kubernetes' own tests to run (default: all that fit)")
)

func TestMain(m *testing.M) {
	testenv.RunInit(prepareMachine)
	flag.Parse()
	var err error
	families, err = parseFamilies(*ipFamily)
	if err = errors.Join(err, listenOnHost()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	testenv.Main(m)
}

// binary returns the path of a program that `make cluster` has built.
func binary(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(os.Getenv(testenv.BinDirEnv), name)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v: run this with `make cluster`", err)
	}
	return path
}
