package kube

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// controlPlane is etcd, an API server, and, if wanted, the controllers and the scheduler, on the router between the nodes'
// links.
type controlPlane struct {
	t       *testing.T
	ns      *testenv.Namespace
	creds   *credentials
	dir     string
	admin   string // file
	daemons map[string]*daemon
	started []*daemon // also those of nodes
}

// newControlPlane prepares a control plane; start starts it, when all users are known.
func newControlPlane(t *testing.T, ns *testenv.Namespace) *controlPlane {
	t.Helper()
	c := &controlPlane{t: t, ns: ns, dir: t.TempDir(), daemons: map[string]*daemon{}}
	c.creds = newCredentials(t, apiURL(), apiAddr(), families[0].service(), netip.MustParseAddr("127.0.0.1"))
	c.admin = c.userFile("admin", "system:masters")
	return c
}

// userFile makes a user and returns the path of its kubeconfig.
func (c *controlPlane) userFile(name, group string) string {
	c.t.Helper()
	path := filepath.Join(c.dir, strings.ReplaceAll(name, ":", "-")+".kubeconfig")
	testenv.Must(c.t, os.WriteFile(path, []byte(c.creds.user(c.t, name, group)), 0o600))
	return path
}

// startAPI starts etcd and the API server, and waits until it answers.
func (c *controlPlane) startAPI() {
	c.t.Helper()
	c.start("etcd", "--data-dir="+filepath.Join(c.dir, "etcd"), "--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync")
	c.startAPIServer()
}

func (c *controlPlane) startAPIServer() {
	c.t.Helper()
	c.start("kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379", "--advertise-address="+apiAddr().String(), fmt.Sprintf("--secure-port=%d", apiPort),
		"--tls-cert-file="+c.creds.path(certificateFile), "--tls-private-key-file="+c.creds.path(keyFile),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+c.creds.path(keyFile), "--service-account-signing-key-file="+c.creds.path(keyFile),
		"--token-auth-file="+c.creds.path(tokensFile), "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-cluster-ip-range="+servicePrefixes(), "--kubelet-preferred-address-types=InternalIP", "--allow-privileged", "--profiling=false")
	c.eventually("API server", func() error {
		_, err := c.kubectl("get", "--raw", "/readyz")
		return err
	})
}

// startControllers starts the controllers and the scheduler.
func (c *controlPlane) startControllers(manager, scheduler string) {
	c.t.Helper()
	c.start("kube-controller-manager", "--kubeconfig="+manager, "--leader-elect=false", "--use-service-account-credentials", "--profiling=false",
		"--authentication-kubeconfig="+manager, "--authorization-kubeconfig="+manager,
		"--service-account-private-key-file="+c.creds.path(keyFile), "--root-ca-file="+c.creds.path(certificateFile),
		"--allocate-node-cidrs", "--cluster-cidr="+podPrefixes(), "--service-cluster-ip-range="+servicePrefixes())
	c.start("kube-scheduler", "--kubeconfig="+scheduler, "--leader-elect=false", "--profiling=false",
		"--authentication-kubeconfig="+scheduler, "--authorization-kubeconfig="+scheduler)
}

// start starts a program on the host of the control plane. The end of the test ends it.
func (c *controlPlane) start(name string, args ...string) {
	c.t.Helper()
	d := startDaemon(c.t, name, c.ns.Command(context.Background(), binary(c.t, name), args...))
	c.daemons[name] = d
	c.started = append(c.started, d)
	c.t.Cleanup(d.kill)
}

// kubectl returns what it prints on standard output.
func (c *controlPlane) kubectl(args ...string) (string, error) { return c.apply(nil, args...) }

// apply is kubectl with a standard input.
func (c *controlPlane) apply(stdin []byte, args ...string) (string, error) {
	cmd := c.kubectlCommand(testenv.Context(c.t), args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(stdin), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, &stderr)
	}
	return strings.TrimSpace(stdout.String()), nil
}

func (c *controlPlane) kubectlCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := c.ns.Command(ctx, binary(c.t, "kubectl"), append([]string{"--kubeconfig=" + c.admin}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	return cmd
}

// must is kubectl that succeeds.
func (c *controlPlane) must(args ...string) string {
	c.t.Helper()
	output, err := c.kubectl(args...)
	testenv.Must(c.t, err)
	return output
}

// eventually waits longer than testenv.Eventually: all of Kubernetes starts on two CPUs.
func (c *controlPlane) eventually(what string, condition func() error) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*testenv.Timeout)
	defer cancel()
	testenv.Must(c.t, testenv.Wait(ctx, what, func() error {
		for _, d := range c.started {
			select {
			case <-d.ended:
				if !d.killed {
					c.t.Fatalf("wait for %s: %s ended: %s", what, d.name, d.tail())
				}
			default:
			}
		}
		return condition()
	}))
}

// logs returns the directory of logs.
func (c *controlPlane) logs() string {
	if *logDir != "" {
		return *logDir
	}
	return c.dir
}
