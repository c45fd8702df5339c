package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// machineEnv marks the first process of a machine, and is the machine's name.
const machineEnv = "EBPFNET_TEST_MACHINE"

// machine is a host with network, mount, PID, UTS and cgroup namespaces of its own. All of its processes end with its
// first one.
type machine struct {
	*testenv.Namespace
	t       *testing.T
	pid     int
	daemons []*daemon
}

// newMachine starts the first process of a machine and waits until it has mounted its directories.
func newMachine(t *testing.T, name string) *machine {
	t.Helper()
	m := &machine{Namespace: testenv.New(t, name), t: t}
	init := m.Reexec()
	init.Env = append(init.Env, machineEnv+"="+name)
	init.SysProcAttr.Cloneflags |= unix.CLONE_NEWUTS
	stdin, err := init.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := init.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Do(init.Start); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	m.pid = init.Process.Pid
	t.Cleanup(func() {
		stdin.Close() // ends runMachine, and the kernel all other processes
		if err := init.Wait(); err != nil {
			t.Errorf("first process of %s: %v", name, err)
		}
		for _, d := range m.daemons {
			<-d.ended
		}
		testenv.Eventually(t, "end of the cgroups of "+name, func() error { return removeCgroups(name) })
	})
	if _, err := io.ReadFull(stdout, make([]byte, 1)); err != nil {
		t.Fatalf("wait for the mounts of %s: %v", name, err)
	}
	return m
}

// runMachine is the first process of a machine. It reaps the processes of others until its parent closes standard input.
func runMachine() {
	testenv.Isolate()
	name := os.Getenv(machineEnv)
	if err := errors.Join(unix.Sethostname([]byte(name)), enterCgroups(name), mountState()); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	go func() {
		for range children {
			for pid := 1; pid > 0; {
				pid, _ = syscall.Wait4(-1, nil, unix.WNOHANG, nil)
			}
		}
	}()
	os.Stdout.WriteString("\n")
	io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// mountState makes the directories empty in which a node keeps its state, and /etc this machine's own.
func mountState() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil { // as systemd does
		return fmt.Errorf("share mounts: %w", err)
	}
	for _, dir := range []string{"/var/lib", "/var/log", "/opt"} {
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount tmpfs on %s: %w", dir, err)
		}
	}
	for _, dir := range []string{"/run/etc", "/run/etc.work"} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("overlay", "/etc", "overlay", 0, "lowerdir=/etc,upperdir=/run/etc,workdir=/run/etc.work"); err != nil {
		return fmt.Errorf("mount an overlay on /etc: %w", err)
	}
	return errors.Join(hideKernelSettings(), os.RemoveAll("/etc/cni"))
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

const cgroupRoot = "/sys/fs/cgroup"

// cgroups returns this process's groups in the controllers' hierarchies of version 1, by the names of the hierarchies.
func cgroups() (map[string]string, error) {
	content, err := os.ReadFile("/proc/self/cgroup")
	groups := map[string]string{}
	for line := range strings.Lines(string(content)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if name := strings.TrimPrefix(fields[1], "name="); name != "" {
			groups[name] = fields[2]
		}
	}
	if err == nil && groups["memory"] == "" {
		err = errors.New("the memory controller is not in a hierarchy of cgroups version 1, and those of version 2 are not supported here yet")
	}
	return groups, err
}

// enterCgroups moves this process to groups of its own below those that it has, and makes these all that it sees.
func enterCgroups(machine string) error {
	groups, err := cgroups()
	if err != nil {
		return err
	}
	for name, path := range groups {
		dir := filepath.Join(cgroupRoot, name, path, machine)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if name == "cpuset" {
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				value, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
				if err := errors.Join(err, os.WriteFile(filepath.Join(dir, file), value, 0o644)); err != nil {
					return err
				}
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0o644); err != nil {
			return fmt.Errorf("move to the group %s: %w", dir, err)
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare cgroups: %w", err)
	}
	return mountCgroups(groups)
}

// mountCgroups mounts a /sys in which these are the only groups: kubelets take the first that the table of mounts has.
func mountCgroups(groups map[string]string) error {
	for unix.Unmount("/sys", unix.MNT_DETACH) == nil {
	}
	for _, mount := range [][2]string{{"sysfs", "/sys"}, {"bpf", "/sys/fs/bpf"}, {"tmpfs", cgroupRoot}} {
		if err := unix.Mount(mount[0], mount[1], mount[0], 0, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", mount[0], mount[1], err)
		}
	}
	for name := range groups {
		dir, options := filepath.Join(cgroupRoot, name), name
		if name == "systemd" {
			options = "none,name=systemd"
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("cgroup", dir, "cgroup", 0, options); err != nil {
			return fmt.Errorf("mount cgroup %s: %w", name, err)
		}
	}
	return nil
}

// removeCgroups removes the groups of a machine, which must have no process any more.
func removeCgroups(machine string) error {
	groups, err := cgroups()
	if err != nil {
		return err
	}
	var errs []error
	for name, path := range groups {
		var dirs []string
		_ = filepath.WalkDir(filepath.Join(cgroupRoot, name, path, machine), func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) {
			errs = append(errs, os.Remove(dir))
		}
	}
	return errors.Join(errs...)
}

// path returns the path by which this process finds a file of the machine.
func (m *machine) path(path string) string { return fmt.Sprintf("/proc/%d/root%s", m.pid, path) }

// write writes a file of the machine.
func (m *machine) write(path, content string) {
	m.t.Helper()
	if err := os.MkdirAll(filepath.Dir(m.path(path)), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(m.path(path), []byte(content), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// enter is a script that moves its process to the machine's groups and becomes the program in its arguments.
const enter = `for group in /sys/fs/cgroup/*/cgroup.procs; do echo $$ >$group || exit; done; exec "$@"`

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
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
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
