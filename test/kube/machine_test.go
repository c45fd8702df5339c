package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// machine is a host with network, mount, PID, UTS and cgroup namespaces of its own. All of its processes end with its
// first one.
type machine struct {
	*testenv.Namespace
	t       *testing.T
	pid     int
	daemons []*daemon
}

func newMachine(t *testing.T, name string) *machine {
	t.Helper()
	m := &machine{Namespace: testenv.New(t, name), t: t}
	testenv.Must(t, removeCgroups(name)) // a killed run leaves them
	t.Cleanup(func() {                   // after all of its processes have been killed
		for _, d := range m.daemons {
			<-d.ended
		}
		testenv.Eventually(t, "end of the cgroups of "+name, func() error { return removeCgroups(name) })
	})
	m.pid = m.StartInit(t, name, unix.CLONE_NEWUTS)
	return m
}

// prepareMachine gives the first process of a machine its name, groups and directories.
func prepareMachine(name string) error {
	return errors.Join(
		unix.Sethostname([]byte(name)),
		enterCgroups(name),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""), // as systemd does
		testenv.OwnDirectories("/var/lib", "/var/log", "/opt"),  // where a node keeps its state
		hideKernelSettings())
}

// kernelSettings are those that all machines of this kernel share and a kubelet would change, with the values that it wants.
var kernelSettings = map[string]string{
	"kernel/keys/root_maxbytes": "25000000", "kernel/keys/root_maxkeys": "1000000", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0",
}

// hideKernelSettings shows files with these values instead, so that this host's stay as they are.
func hideKernelSettings() error {
	for name, value := range kernelSettings {
		file := filepath.Join("/run", filepath.Base(name))
		if err := os.WriteFile(file, []byte(value), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, "/proc/sys/"+name, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("hide the setting %s: %w", name, err)
		}
	}
	return nil
}

// path returns the path by which this process finds a file of the machine.
func (m *machine) path(path string) string { return fmt.Sprintf("/proc/%d/root%s", m.pid, path) }

// write writes a file of the machine.
func (m *machine) write(path, content string) {
	m.t.Helper()
	testenv.Must(m.t, os.MkdirAll(filepath.Dir(m.path(path)), 0o755))
	testenv.Must(m.t, os.WriteFile(m.path(path), []byte(content), 0o600))
}

// enter is a script that moves its process to the machine's groups and becomes the program in its arguments.
const enter = `while read -r group; do echo $$ >$group/cgroup.procs || exit; done <` + cgroupList + `; exec "$@"`

// command runs a program in all namespaces of the machine.
func (m *machine) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	args = append([]string{"--target", fmt.Sprint(m.pid), "--mount", "--net", "--pid", "--uts", "--cgroup", "--",
		"sh", "-c", enter, "sh", name}, args...)
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	cmd.Env = append(os.Environ(), "HOME=/run", "PATH="+os.Getenv(testenv.BinDirEnv)+":"+os.Getenv("PATH"),
		"CNI_PATH=/opt/cni/bin", "NETCONFPATH=/etc/cni/net.d")
	cmd.WaitDelay = time.Second
	return cmd
}

// run runs a program and returns what it prints.
func (m *machine) run(name string, args ...string) string {
	m.t.Helper()
	output, err := m.command(testenv.Context(m.t), name, args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s on %s: %v: %s", append([]string{name}, args...), m.Name, err, output)
	}
	return string(output)
}

// start starts a program that ends with the machine.
func (m *machine) start(name string, args ...string) *daemon {
	m.t.Helper()
	d := startDaemon(m.t, m.Name+"-"+filepath.Base(name), m.command(context.Background(), name, args...))
	m.daemons = append(m.daemons, d)
	return d
}

// daemon is a program that runs until it is killed.
type daemon struct {
	name  string
	log   string // its file
	cmd   *exec.Cmd
	ended chan struct{}
	// killed says that its end is no fault.
	killed bool
}

func startDaemon(t *testing.T, name string, cmd *exec.Cmd) *daemon {
	t.Helper()
	dir := *logDir
	if dir == "" {
		dir = t.TempDir()
	}
	d := &daemon{name: name, log: filepath.Join(dir, name+".log"), cmd: cmd, ended: make(chan struct{})}
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	testenv.Must(t, err)
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	testenv.Must(t, cmd.Start())
	go func() {
		_ = cmd.Wait()
		close(d.ended)
	}()
	return d
}

// kill ends the program and waits for its end.
func (d *daemon) kill() {
	d.killed = true
	d.signal(unix.SIGKILL)
	<-d.ended
}

// signal sends a signal to the program, which is the child of an nsenter that has entered a PID namespace. A stop of the
// child stops nsenter, too.
func (d *daemon) signal(signal unix.Signal) {
	pid := d.cmd.Process.Pid
	program := pid
	if children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid)); err == nil {
		_, _ = fmt.Sscan(string(children), &program)
	}
	_ = unix.Kill(program, signal)
	if program != pid && signal != unix.SIGSTOP {
		_ = unix.Kill(pid, unix.SIGCONT)
	}
}

// tail returns the last lines of the log.
func (d *daemon) tail() string {
	const most = 4000
	content, _ := os.ReadFile(d.log)
	return string(content[max(0, len(content)-most):])
}
