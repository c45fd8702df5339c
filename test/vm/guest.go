package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// isGuestInit reports whether this process is the init of a guest and not a runner.
func isGuestInit() bool { return os.Getpid() == 1 && os.Args[0] == "/init" }

// guestMain is the guest's init: it prepares the system, runs the job's program and sends the exit
// status to the runner, which then ends the guest. It never returns; after a failure it prints the
// reason on the console and ends the guest.
func guestMain() {
	err := runJob()
	fmt.Fprintln(os.Stderr, "vm: init failed:", err)
	// With qemu's -no-reboot this ends the guest.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	panic("reboot failed") // then the kernel panics as well
}

func runJob() error {
	j, err := readJob()
	if err != nil {
		return err
	}
	if err := mountAll(initramfsMounts); err != nil {
		return err
	}
	if j.Foreign { // or the kernel asks modprobe for a module that can run modprobe
		if err := os.WriteFile("/proc/sys/kernel/modprobe", []byte("\n"), 0); err != nil {
			return err
		}
	}
	if err := loadBootModules(j); err != nil {
		return err
	}
	port, err := openPort()
	if err != nil {
		return err
	}
	if err := enterHostRoot(j); err != nil {
		return err
	}
	if err := configureSystem(j); err != nil {
		return err
	}
	if err := loadModules(j); err != nil {
		return err
	}
	return runProgram(j, port)
}

func readJob() (*job, error) {
	text, err := os.ReadFile(jobFile)
	if err != nil {
		return nil, err
	}
	var j job
	if err := json.Unmarshal(text, &j); err != nil {
		return nil, fmt.Errorf("read %s: %w", jobFile, err)
	}
	return &j, nil
}

type mount struct {
	source, target, fsType string
	flags                  uintptr
	data                   string
}

const noCode = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// Mount options of 9p: cached pages make the host's files mappable, large messages make them fast.
// The host's files must not change while the guest runs.
const (
	options9p       = "trans=virtio,version=9p2000.L,msize=262144"
	options9pCached = options9p + ",cache=loose"
)

var initramfsMounts = []mount{
	{"dev", "/dev", "devtmpfs", 0, ""},
	{"proc", "/proc", "proc", noCode, ""},
	{"sys", "/sys", "sysfs", noCode, ""},
}

// rootMounts and overlayMount build the future root in /new: the host's root as the lower layer, a
// tmpfs as the upper one.
var rootMounts = []mount{
	{"root", "/host", "9p", unix.MS_RDONLY, options9pCached},
	{"memory", "/memory", "tmpfs", 0, "size=90%"},
}

var overlayMount = mount{"root", "/new", "overlay", 0, "lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work"}

// systemMounts are mounted in the new root.
var systemMounts = []mount{
	{"dev", "/dev", "devtmpfs", unix.MS_NOSUID, ""},
	{"pts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,ptmxmode=0666"},
	{"shm", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, ""},
	{"proc", "/proc", "proc", noCode, ""},
	{"run", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	{"sys", "/sys", "sysfs", noCode, ""},
	{"bpf", "/sys/fs/bpf", "bpf", noCode, "mode=0700"},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", noCode, ""},
	{"debug", "/sys/kernel/debug", "debugfs", noCode, ""},
	{"tracing", "/sys/kernel/tracing", "tracefs", noCode, ""},
}

// mountAll creates missing mount points.
func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.source, m.target, m.fsType, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s on %s: %w", m.fsType, m.target, err)
		}
	}
	return nil
}

// enterHostRoot makes a copy-on-write view of the host's files the root of this process.
func enterHostRoot(j *job) error {
	if err := mountAll(rootMounts); err != nil {
		return err
	}
	if err := errors.Join(os.Mkdir("/memory/upper", 0o755), os.Mkdir("/memory/work", 0o755)); err != nil {
		return err
	}
	if err := mountAll([]mount{overlayMount}); err != nil {
		return err
	}
	for i, dir := range j.Shares {
		if err := mountAll([]mount{{shareTag(i), "/new" + dir, "9p", 0, options9p}}); err != nil {
			return err
		}
	}
	if err := os.Chdir("/new"); err != nil {
		return err
	}
	// The initramfs cannot be unmounted, so the new root covers it.
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter root: %w", err)
	}
	return os.Chdir("/")
}

// configureSystem does what the init of a distribution does.
func configureSystem(j *job) error {
	if err := mountAll(systemMounts); err != nil {
		return err
	}
	modules := filepath.Join("/lib/modules", j.Release)
	if err := mountAll([]mount{{j.ModuleDir, modules, "", unix.MS_BIND, ""}}); err != nil {
		return err
	}
	for name, target := range map[string]string{
		"/dev/fd":     "/proc/self/fd",
		"/dev/stdin":  "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1",
		"/dev/stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, name); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte("ebpfnet-vm")); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	// systemd's defaults for a service. The limit of locked memory stays the kernel's default, against
	// which kernels before 5.11 count BPF maps.
	files := unix.Rlimit{Cur: 1024, Max: 512 << 10}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return fmt.Errorf("set limit of open files: %w", err)
	}
	return setLoopbackUp()
}

func setLoopbackUp() error {
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

func loadBootModules(j *job) error {
	for i, module := range j.BootModules {
		if err := loadModule(bootModulePath(i, module)); err != nil {
			return err
		}
	}
	return nil
}

func loadModules(j *job) error {
	for _, module := range j.Modules {
		if err := loadModule(filepath.Join(j.ModuleDir, module)); err != nil {
			return err
		}
	}
	return nil
}

// loadModule succeeds if the kernel has the module already.
func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if !strings.HasSuffix(path, ".ko") {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	err = unix.FinitModule(int(f.Fd()), "", flags)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load module %s: %w", path, err)
	}
	return nil
}
