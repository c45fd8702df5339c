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

// node is a machine with a runtime of pods, as the kubelet sees it.
type node struct {
	*machine
	cri.RuntimeServiceClient
	images  cri.ImageServiceClient
	runtime daemon
}

// daemon is a runtime of pods.
type daemon struct {
	command    string // starts it
	socket     string
	containers string   // files with the processes of its containers, as a shell's pattern
	local      []string // addresses of the host ports beside the node's
}

func newNode(t *testing.T, m *machine, d daemon) node {
	t.Helper()
	connection, err := grpc.NewClient("unix://"+m.path(d.socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	t.Cleanup(func() { connection.Close() })
	return node{m, cri.NewRuntimeServiceClient(connection), cri.NewImageServiceClient(connection), d}
}

// start starts the runtime and waits until it has read its network.
func (n node) start(t *testing.T) {
	t.Helper()
	n.startDaemon(t, "sh", "-c", "echo $$ >"+daemonPID+"; exec "+n.runtime.command)
	testenv.Eventually(t, "the runtime", func() error {
		condition, err := n.network(t)
		if err == nil && strings.Contains(condition.Message, "initialized") { // not yet, in the words of each
			err = fmt.Errorf("network: %s", condition.Message)
		}
		return err
	})
}

// network returns the condition of the network that the kubelet reports for its node.
func (n node) network(t *testing.T) (*cri.RuntimeCondition, error) {
	t.Helper()
	response, err := n.Status(testenv.Context(t), &cri.StatusRequest{})
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

func (n node) waitForImage(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, "the image", func() error {
		status, err := n.images.ImageStatus(testenv.Context(t), &cri.ImageStatusRequest{Image: &cri.ImageSpec{Image: image}})
		if err == nil && status.Image == nil {
			err = fmt.Errorf("no image %s", image)
		}
		return err
	})
}

// eachRuntime runs a test under each runtime of pods, with the list that users copy.
func eachRuntime(t *testing.T, test func(t *testing.T, n node)) {
	eachContainerd(t, func(t *testing.T, c containerd) { test(t, c.node) })
	t.Run("crio", func(t *testing.T) { test(t, newCRIO(t, example(t, "example.conflist")).node) })
}
