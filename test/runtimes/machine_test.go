package runtimes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Directories of a machine: for programs, and where runtimes look for plugins and networks by default.
const (
	binDir    = "/run/bin"
	pluginDir = "/opt/cni/bin"
	configDir = "/etc/cni/net.d"
)

// daemonPID has the process of a machine's runtime.
const daemonPID = "/run/daemon.pid"

// machine is the node of a topology with mounts and processes of its own. All of them end with its
// first process: daemons, containers, and what runtimes leave in /run and bpffs.
type machine struct {
	*testenv.Topology
	pid     int
	env     []string // of its commands, beside this process's
	daemons []func() // wait for their ends
}

// newMachine starts a machine that has the plugin and a network configuration.
func newMachine(t *testing.T, conflist []byte) *machine {
	t.Helper()
	m := startMachine(t, "/")
	m.install(t, testenv.Build(t, "./cmd/ebpfnet"), pluginDir+"/ebpfnet")
	m.install(t, testenv.Build(t, "./cmd/ebpfnetctl"), binDir+"/ebpfnetctl")
	m.write(t, configDir+"/10-ebpfnet.conflist", conflist)
	return m
}

// startMachine starts a machine with nothing of ours. It has the system in an archive, or this one: "/".
func startMachine(t *testing.T, system string) *machine {
	t.Helper()
	m := &machine{Topology: testenv.NewTopology(t), env: []string{"PATH=" + binDir + ":" + os.Getenv("PATH")}}
	t.Cleanup(func() { // after all of its processes have been killed
		for _, wait := range m.daemons {
			wait()
		}
	})
	m.pid = m.Node.StartInit(t, system, 0)
	return m
}

// prepareMachine mounts what the first process of a machine has of its own.
func prepareMachine(system string) error {
	// The host's may be a mixture of versions, which crun refuses.
	err := unix.Mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, "")
	if system == "/" {
		return errors.Join(err, testenv.OwnDirectories("/opt"))
	}
	return errors.Join(err, enterSystem(system))
}

// enterSystem unpacks a system and makes it this process's root, with the machine's own directories.
func enterSystem(archive string) error {
	const root = "/run/system"
	if err := os.Mkdir(root, 0o755); err != nil {
		return err
	}
	if output, err := exec.Command("tar", "-C", root, "--exclude=./dev/*", "-xf", archive).CombinedOutput(); err != nil {
		return fmt.Errorf("unpack %s: %w: %s", archive, err, output)
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(dir, root+dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	return errors.Join(
		unix.Mount(root, root, "", unix.MS_BIND|unix.MS_REC, ""),
		unix.Mount("tmpfs", root+"/run", "tmpfs", 0, "mode=0755"),
		unix.Chroot(root), os.Chdir("/"))
}

// startDaemon starts a program that ends with the machine. If the test fails, it shows what the
// program has printed.
func (m *machine) startDaemon(t *testing.T, name string, args ...string) {
	t.Helper()
	var output bytes.Buffer
	daemon := m.command(context.Background(), name, args...)
	daemon.Stdout, daemon.Stderr = &output, &output
	testenv.Must(t, daemon.Start())
	m.daemons = append(m.daemons, func() {
		daemon.Wait()
		if t.Failed() {
			t.Logf("%s: %s", name, &output)
		}
	})
}

// kill kills the daemon that wrote daemonPID, as the kernel does it for want of memory. Its containers go on.
func (m *machine) kill(t *testing.T) {
	t.Helper()
	m.run(t, "sh", "-c", "kill -KILL $(cat "+daemonPID+")")
	testenv.Eventually(t, "the end of the runtime", func() error {
		if output, err := m.command(testenv.Context(t), "sh", "-c", "! kill -0 $(cat "+daemonPID+")").CombinedOutput(); err != nil {
			return fmt.Errorf("it is there: %w: %s", err, output)
		}
		return nil
	})
}

// path returns the path by which this process finds a file of the machine.
func (m *machine) path(file string) string { return fmt.Sprintf("/proc/%d/root%s", m.pid, file) }

// install copies a file into the machine.
func (m *machine) install(t *testing.T, from, to string) {
	t.Helper()
	m.write(t, to, testenv.ReadFile(t, from))
}

// installPlugins installs reference plugins.
func (m *machine) installPlugins(t *testing.T, plugins ...string) {
	t.Helper()
	for _, plugin := range plugins {
		m.install(t, testenv.Build(t, "github.com/containernetworking/plugins/plugins/"+plugin), pluginDir+"/"+path.Base(plugin))
	}
}

func (m *machine) write(t *testing.T, file string, content []byte) {
	t.Helper()
	testenv.Must(t, os.MkdirAll(path.Dir(m.path(file)), 0o755))
	testenv.Must(t, os.WriteFile(m.path(file), content, 0o755))
}

// command runs a program in all namespaces of the machine.
func (m *machine) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	enter := []string{"--target", fmt.Sprint(m.pid), "--mount", "--net", "--pid", "--root", "--wd", "--", name}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
	cmd.Env = append(os.Environ(), m.env...)
	cmd.WaitDelay = time.Second
	return cmd
}

// run runs a command of the machine and returns what it prints.
func (m *machine) run(t *testing.T, name string, args ...string) string {
	t.Helper()
	output, err := m.command(testenv.Context(t), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, output)
	}
	return strings.TrimSpace(string(output))
}

// wantNamed wants a container by the name that the runtime gave it.
func (m *machine) wantNamed(t *testing.T, name string) {
	t.Helper()
	if got := m.run(t, "ebpfnetctl", "attachments", name); !strings.Contains(got, "name: "+name+"\n") {
		t.Errorf("attachments %s: got %s, want the name", name, got)
	}
}

func (m *machine) wantNoAttachment(t *testing.T) {
	t.Helper()
	if got := m.run(t, "ebpfnetctl", "attachments", "-o", "json"); got != "[]" {
		t.Errorf("attachments: got %s, want none", got)
	}
}

// state lists what containers leave on a host: attachments, host ports, devices, network namespaces, and files of CNI.
func (m *machine) state(t *testing.T) string {
	t.Helper()
	return m.run(t, "sh", "-c", `
		for noun in attachments ports; do ebpfnetctl $noun -o json 2>/dev/null | grep -vxF '[]'; done
		ip -brief link | cut -d ' ' -f 1
		find /run/netns /run/ebpfnet /var/lib/cni -type f ! -name last_reserved_ip.* ! -name '*lock*' 2>/dev/null | sort
		mount | grep -c nsfs || true`)
}

// waitForState is wantState for a runtime that ends containers later.
func (m *machine) waitForState(t *testing.T, want string) {
	t.Helper()
	testenv.Eventually(t, "the end of containers", func() error {
		if got := m.state(t); got != want {
			return fmt.Errorf("left on the host:\n%s\nwant:\n%s", got, want)
		}
		return nil
	})
}

func (m *machine) wantState(t *testing.T, want string) {
	t.Helper()
	if got := m.state(t); got != want {
		t.Errorf("left on the host:\n%s\nwant:\n%s", got, want)
	}
}
