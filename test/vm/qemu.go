package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

type hostTool struct{ program, pkg string }

// hostTools are the programs that the runner starts, with their Debian packages.
var hostTools = []hostTool{
	{"apt-get", "apt"},
	{"dpkg-deb", "dpkg"},
	{"depmod", "kmod"},
	{"xz", "xz-utils"},
	{"zstd", "zstd"},
}

// checkHostTools returns an error that names the packages to install.
func checkHostTools(a arch) error {
	var missing []error
	for _, tool := range append(hostTools, hostTool{a.qemu, a.pkg}) {
		if _, err := exec.LookPath(tool.program); err != nil {
			missing = append(missing, fmt.Errorf("%s is missing: install Debian's package %s", tool.program, tool.pkg))
		}
	}
	if _, err := os.Stat(archiveKeyring); err != nil {
		missing = append(missing, fmt.Errorf("%s is missing: install Debian's package debian-archive-keyring", archiveKeyring))
	}
	return errors.Join(missing...)
}

// machine is a running qemu.
type machine struct {
	cmd     *exec.Cmd
	port    *os.File // the host's end of the guest's serial port
	console *consoleTail
}

// startMachine boots the image with the initramfs. The caller must stop the machine, and must be locked
// to a thread that lives as long as the runner: the kernel kills qemu when that thread ends, even by
// SIGKILL.
func startMachine(opts *options, j *job, kernelFile string, initramfs *os.File) (*machine, error) {
	port, qemuPort, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer qemuPort.Close()

	console := newConsoleTail(opts.console)
	cmd := exec.Command(opts.arch.qemu, qemuArgs(opts, j, kernelFile)...)
	cmd.ExtraFiles = []*os.File{qemuPort, initramfs}
	cmd.Stdout, cmd.Stderr = console, console
	// In its own process group: Ctrl-C in a terminal must reach the runner only.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		port.Close()
		return nil, fmt.Errorf("start qemu: %w", err)
	}
	return &machine{cmd: cmd, port: port, console: console}, nil
}

// stop ends qemu and waits until it is gone.
func (m *machine) stop() {
	_ = m.cmd.Process.Kill() // fails only if it has ended already
	_ = m.cmd.Wait()         // reports that it was killed
	m.port.Close()
}

// File descriptors of qemu, in the order of ExtraFiles.
const (
	portFD      = 3
	initramfsFD = 4
)

func qemuArgs(opts *options, j *job, kernelFile string) []string {
	// An oops ends the guest like a panic; addresses are the same in every run; emulated mitigations
	// would cost a fifth of the time. On a busy host the first ticks may be too late for the kernel's check of its timer.
	commandLine := "console=" + opts.arch.console + " panic=-1 oops=panic loglevel=5 norandmaps random.trust_cpu=on mitigations=off no_timer_check"
	args := []string{
		"-accel", opts.accel,
		"-smp", strconv.Itoa(opts.cpus), "-m", opts.memory,
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", kernelFile, "-append", commandLine,
		"-initrd", fmt.Sprintf("/proc/self/fd/%d", initramfsFD),
		"-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
		"-chardev", fmt.Sprintf("socket,id=port,fd=%d", portFD),
		"-device", "virtio-serial-pci",
		"-device", "virtserialport,chardev=port,name=" + portName,
	}
	args = append(args, opts.arch.machine...)
	if opts.icount {
		// An idle guest's clock follows the host's. With sleep=off it would jump to the next timer, so that a
		// program that waits for a file of the host's would time out.
		args = append(args, "-icount", "shift=0,sleep=on")
	}
	args = append(args, shareArgs("root", "/", ",readonly=on")...)
	for i, dir := range j.Shares {
		args = append(args, shareArgs(shareTag(i), dir, "")...)
	}
	return args
}

// shareArgs exports a host directory to the guest over 9p, with the given mount tag.
func shareArgs(tag, dir, more string) []string {
	return []string{
		"-fsdev", fmt.Sprintf("local,id=%s,path=%s,security_model=none,multidevs=remap%s", tag, dir, more),
		"-device", fmt.Sprintf("virtio-9p-pci,fsdev=%s,mount_tag=%s", tag, tag),
	}
}

func shareTag(i int) string { return "share" + strconv.Itoa(i) }

// socketPair returns two connected sockets. The first one is non-blocking, for the Go runtime.
func socketPair() (host, other *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "guest port"), os.NewFile(uintptr(fds[1]), "qemu port"), nil
}

// consoleTail keeps the end of the output of the guest's kernel and of qemu.
type consoleTail struct {
	mu   sync.Mutex
	text []byte
	show bool
}

const consoleTailSize = 8 << 10

func newConsoleTail(show bool) *consoleTail { return &consoleTail{show: show} }

func (c *consoleTail) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.show {
		if _, err := os.Stderr.Write(b); err != nil {
			return 0, err
		}
	}
	c.text = append(c.text, b...)
	c.text = c.text[max(0, len(c.text)-consoleTailSize):]
	return len(b), nil
}

func (c *consoleTail) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.text)
}
