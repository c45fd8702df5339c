package kube

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var upDir = flag.String("up", "", "TestUp: keep a cluster until SIGTERM, and write to `DIR` how to use it")

// hostListenerEnv has the descriptor of a listener that the host can reach. TestUp inherits it.
const hostListenerEnv = "EBPFNET_KUBE_LISTENER"

// listenOnHost opens that listener, before this process gets a network of its own.
func listenOnHost() error {
	if *upDir == "" || os.Getenv(hostListenerEnv) != "" {
		return nil
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return err
	}
	inherited, err := unix.Dup(int(file.Fd())) // which an exec does not close
	if err != nil {
		return err
	}
	return os.Setenv(hostListenerEnv, fmt.Sprint(inherited))
}

// hostListener returns the listener, which no program that this one starts inherits.
func hostListener(t *testing.T) net.Listener {
	t.Helper()
	descriptor, err := strconv.Atoi(os.Getenv(hostListenerEnv))
	testenv.Must(t, err)
	unix.CloseOnExec(descriptor)
	listener, err := net.FileListener(os.NewFile(uintptr(descriptor), "listener"))
	testenv.Must(t, err)
	return listener
}

// TestUp keeps a cluster for a person until SIGTERM.
func TestUp(t *testing.T) {
	if *upDir == "" {
		t.Skip("`make cluster-up` runs it")
	}
	stop, cancel := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer cancel()
	listener := hostListener(t)
	c := newCluster(t)
	t.Log("starting Kubernetes")
	c.startKubernetes()
	c.startDNS()
	t.Log("installing the agent")
	c.startAgents()
	kubeconfig := testenv.ReadFile(t, c.admin)
	here := strings.Replace(string(kubeconfig), apiURL(), "https://"+c.publish(stop, listener), 1)
	for name, content := range map[string]string{"kubeconfig": here, "node": c.nodeScript()} {
		testenv.Must(t, os.WriteFile(filepath.Join(*upDir, name), []byte(content), 0o700))
	}
	t.Log("ready") // `make cluster-up` waits for it
	<-stop.Done()
}

// publish forwards connections to an address of the host to the API server.
func (c *cluster) publish(ctx context.Context, listener net.Listener) (addr string) {
	context.AfterFunc(ctx, func() { listener.Close() })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer client.Close()
				server, err := c.ns.Dial(ctx, "tcp", netip.AddrPortFrom(apiAddr(), apiPort))
				if err != nil {
					return
				}
				defer server.Close()
				go pipe(server, client)
				pipe(client, server)
			}()
		}
	}()
	return listener.Addr().String()
}

// pipe copies until from ends, and says so to the other.
func pipe(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_ = to.(*net.TCPConn).CloseWrite()
}

// nodeScript returns a script for the host that runs a command on a node. It finds the node's first process, as this
// test's processes know it, from the parent of this one.
func (c *cluster) nodeScript() string {
	var script strings.Builder
	fmt.Fprintf(&script, "#!/bin/sh\n# Usage: %s NODE [COMMAND...]\nnode=$1; shift\ncase $node in\n", filepath.Join(*upDir, "node"))
	for _, n := range c.nodes {
		fmt.Fprintf(&script, "%s) pid=%d ;;\n", n.Name, n.pid)
	}
	fmt.Fprintf(&script, `*) echo "no node $node" >&2; exit 2 ;;
esac
[ $# -gt 0 ] || set -- sh
test=$(cat %[1]s/pid)
exec nsenter --target $(cat /proc/$test/task/$test/children) --mount --pid --cgroup -- \
	nsenter --target $pid --mount --net --pid --uts --cgroup -- env PATH="%[2]s:$PATH" sh -c '%[3]s' sh "$@"
`, *upDir, os.Getenv(testenv.BinDirEnv), enter)
	return script.String()
}
