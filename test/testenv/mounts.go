package testenv

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	bpffsDir = "/sys/fs/bpf"
	netnsDir = "/run/netns"
	buildDir = "/run/testenv-bin"
	tempDir  = "/run/tmp"
)

// privateState are the directories under /var/lib that the tested plugins write to. They
// start empty.
var privateState = map[string]bool{"cni": true, "ebpfnet": true}

// setup prepares the new namespaces as Isolate documents.
func setup() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := mount("proc", "/proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if err := setupRun(); err != nil {
		return err
	}
	if err := setupState("/var/lib"); err != nil {
		return err
	}
	if err := setupSys(); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up, which needs CAP_NET_ADMIN (in a container: --privileged): %w", err)
	}
	return nil
}

// setupRun mounts a new /run, with the temporary directory of this process: files that a
// killed test leaves there disappear with the namespace.
func setupRun() error {
	if err := mount("tmpfs", "/run", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return err
	}
	for dir, mode := range map[string]os.FileMode{
		netnsDir: 0o755, buildDir: 0o755, tempDir: 0o777 | os.ModeSticky, "/run/lock": 0o777 | os.ModeSticky,
	} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := os.Chmod(dir, mode); err != nil { // the umask applies to Mkdir
			return err
		}
	}
	if err := os.Setenv("TMPDIR", tempDir); err != nil {
		return err
	}
	info, err := os.Lstat("/var/run")
	if err != nil || !info.IsDir() {
		return nil // absent, or the usual link to /run
	}
	return bind("/run", "/var/run")
}

// setupState replaces dir with a tmpfs that has the same entries, except for privateState.
// Those often do not exist on the host, and creating mount points there would leave a trace.
func setupState(dir string) error {
	old, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	defer unix.Close(old)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if err := mount("tmpfs", dir, unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return err
	}
	for name := range privateState {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			return err
		}
	}
	for _, entry := range entries {
		if privateState[entry.Name()] {
			continue
		}
		if err := mirror(entry, fmt.Sprintf("/proc/self/fd/%d", old), dir); err != nil {
			return err
		}
	}
	return nil
}

// mirror makes an entry of the directory from visible in the directory to.
func mirror(entry os.DirEntry, from, to string) error {
	from, to = filepath.Join(from, entry.Name()), filepath.Join(to, entry.Name())
	if entry.Type()&os.ModeSymlink != 0 {
		target, err := os.Readlink(from)
		if err != nil {
			return err
		}
		return os.Symlink(target, to)
	}
	if entry.IsDir() {
		if err := os.Mkdir(to, 0o755); err != nil {
			return err
		}
	} else if err := os.WriteFile(to, nil, 0o600); err != nil {
		return err
	}
	return bind(from, to)
}

// setupSys mounts a sysfs with the new network namespace's devices, an empty bpffs and the
// host's cgroups. It also mounts debugfs and tracefs for tracing tools, if it can.
func setupSys() error {
	cgroup, err := unix.Open("/sys/fs/cgroup", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("open /sys/fs/cgroup: %w", err)
	}
	if err := mount("sysfs", "/sys", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if cgroup >= 0 {
		defer unix.Close(cgroup)
		if err := bind(fmt.Sprintf("/proc/self/fd/%d", cgroup), "/sys/fs/cgroup"); err != nil {
			return err
		}
	}
	_ = mount("debugfs", "/sys/kernel/debug", 0, "")
	_ = mount("tracefs", "/sys/kernel/tracing", 0, "")
	return mount("bpf", bpffsDir, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
}

// Mount mounts a file system until the end of the test.
func Mount(tb TB, source, target, fstype string, flags uintptr, data string) {
	tb.Helper()
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		tb.Fatalf("mount %s on %s: %v", source, target, err)
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			tb.Fatalf("unmount %s: %v", target, err)
		}
	})
}

// mount mounts a new file system of the given type on dir.
func mount(fstype, dir string, flags uintptr, data string) error {
	if err := unix.Mount(fstype, dir, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", fstype, dir, err)
	}
	return nil
}

func bind(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind %s on %s: %w", from, to, err)
	}
	return nil
}
