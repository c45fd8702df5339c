package runtimes

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var churn = flag.Int("churn", 50, "how many pods TestManyPods makes, 50 at once")

// ownProcesses makes the processes of a container end with its first one.
var ownProcesses = &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}

// pod describes a pod. hostPort is that of its TCP port 80; 0: none.
func pod(name string, hostPort int) *cri.PodSandboxConfig {
	config := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "uid-" + name},
		Hostname:     name,
		LogDirectory: "/run/logs/" + name,
		Linux:        &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: ownProcesses}},
	}
	if hostPort != 0 {
		config.PortMappings = []*cri.PortMapping{{Protocol: cri.Protocol_TCP, ContainerPort: 80, HostPort: int32(hostPort)}}
	}
	return config
}

// runPod starts a pod without containers.
func (n node) runPod(ctx context.Context, config *cri.PodSandboxConfig) (id string, err error) {
	response, err := n.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	return response.GetPodSandboxId(), err
}

// removePod ends a pod as the kubelet does: with a DEL of its namespace, and one without.
func (n node) removePod(ctx context.Context, id string) error {
	if _, err := n.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return err
	}
	_, err := n.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// addresses returns those of a pod.
func (n node) addresses(ctx context.Context, id string) ([]string, error) {
	response, err := n.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		return nil, err
	}
	network := response.Status.Network
	addresses := []string{network.GetIp()}
	for _, ip := range network.GetAdditionalIps() {
		addresses = append(addresses, ip.Ip)
	}
	if len(addresses) != 2 || response.Status.State != cri.PodSandboxState_SANDBOX_READY {
		return nil, fmt.Errorf("pod: got %s with %q, want it ready with an address of each family", response.Status.State, addresses)
	}
	return addresses, nil
}

// runContainer starts a container of a pod.
func (n node) runContainer(ctx context.Context, pod string, config *cri.PodSandboxConfig, name string, command ...string) (id string, err error) {
	created, err := n.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: config, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name},
		Image:    &cri.ImageSpec{Image: image},
		Command:  append([]string{"/bin/busybox"}, command...),
		LogPath:  name + ".log",
		Linux:    &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: ownProcesses}},
	}})
	if err != nil {
		return "", err
	}
	_, err = n.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: created.ContainerId})
	return created.ContainerId, err
}

// publish starts a pod with one container, whose port 80 is port 8080 of the node.
func (n node) publish(t *testing.T, name string, command ...string) (id string) {
	t.Helper()
	ctx, config := testenv.Context(t), pod(name, 8080)
	id, err := n.runPod(ctx, config)
	if err == nil {
		_, err = n.runContainer(ctx, id, config, "server", command...)
	}
	testenv.Must(t, err)
	return id
}

func (n node) remove(t *testing.T, id string) {
	t.Helper()
	if err := n.removePod(testenv.Context(t), id); err != nil {
		t.Errorf("remove a pod: %v", err)
	}
}

// TestPod has a pod with two containers and a published port. Its connections go on while the runtime is
// killed and starts again, and the next pod takes its port over.
func TestPod(t *testing.T) {
	eachRuntime(t, func(t *testing.T, n node) {
		before := n.state(t)
		id := n.publish(t, "first", echoServer...)
		client, err := n.runContainer(testenv.Context(t), id, pod("first", 8080), "client", "tail", "-f", "/dev/null")
		testenv.Must(t, err)
		addresses, err := n.addresses(testenv.Context(t), id)
		testenv.Must(t, err)
		for _, address := range append(addresses, "127.0.0.1", "::1") {
			n.wantExec(t, client, "hello", "sh", "-c", "echo hello | busybox nc -w 60 "+address+" 80")
		}
		open := n.connections(t, n.runtime.local...)
		n.kill(t)
		open.want(t, "without the runtime")
		n.start(t)
		open.want(t, "after the restart of the runtime")
		if again, err := n.addresses(testenv.Context(t), id); err != nil || !slices.Equal(again, addresses) {
			t.Errorf("after the restart: got %q, %v; want %q", again, err, addresses)
		}
		n.remove(t, id)

		id = n.publish(t, "second", webServer...)
		n.wantPublished(t)
		n.wantNamed(t, "default/second")
		n.remove(t, id)
		n.wantState(t, before)
	})
}

// wantExec wants the output of a command in a container, as `kubectl exec` and probes run it.
func (n node) wantExec(t *testing.T, container, want string, command ...string) {
	t.Helper()
	testenv.Eventually(t, fmt.Sprintf("%q", command), func() error {
		response, err := n.ExecSync(testenv.Context(t), &cri.ExecSyncRequest{ContainerId: container, Cmd: append([]string{"/bin/busybox"}, command...)})
		if err == nil && strings.TrimSpace(string(response.Stdout)) != want {
			err = fmt.Errorf("got %q and %q, want %q", response.Stdout, response.Stderr, want)
		}
		return err
	})
}

// TestLostPod kills a pod and takes its namespaces away while there is no runtime: it knows of the pod by
// its own files alone, and its calls of DEL have no namespace.
func TestLostPod(t *testing.T) {
	eachRuntime(t, func(t *testing.T, n node) {
		before := n.state(t)
		id := n.publish(t, "lost", webServer...)
		n.wantPublished(t)
		n.kill(t)
		n.run(t, "sh", "-c", `
			kill -KILL $(cat `+n.runtime.containers+`)
			for namespace in /run/*ns/*; do umount $namespace && rm $namespace; done`)
		n.start(t)
		n.remove(t, id)
		n.wantState(t, before)
	})
}

// TestManyPods makes pods with a host port each, 50 at once, and removes them at once.
func TestManyPods(t *testing.T) {
	eachRuntime(t, func(t *testing.T, n node) {
		const many = 50
		before := n.state(t)
		for made := 0; made < *churn && !t.Failed(); made += many {
			ids, addresses := make([]string, many), make([][]string, many)
			atOnce(t, many, func(ctx context.Context, i int) (err error) {
				if ids[i], err = n.runPod(ctx, pod(fmt.Sprintf("pod%d", made+i), 8000+i)); err == nil {
					addresses[i], err = n.addresses(ctx, ids[i])
				}
				return err
			})
			all := slices.Concat(addresses...)
			slices.Sort(all)
			if n := len(slices.Compact(all)); n != 2*many {
				t.Errorf("got %d different addresses, want %d", n, 2*many)
			}
			atOnce(t, many, func(ctx context.Context, i int) error {
				return n.removePod(ctx, ids[i])
			})
			n.wantState(t, before)
		}
	})
}

// atOnce calls f n times at once.
func atOnce(t *testing.T, n int, f func(ctx context.Context, i int) error) {
	t.Helper()
	errs := make([]error, n)
	ctx, cancel := context.WithTimeout(t.Context(), 3*testenv.Timeout) // 50 pods take long on a slow machine
	defer cancel()
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { errs[i] = f(ctx, i) })
	}
	group.Wait()
	testenv.Must(t, errors.Join(errs...))
}
