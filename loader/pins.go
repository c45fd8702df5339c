package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Root is the directory of everything that ebpfnet pins. It is also what writers lock.
const Root = bpffs + "/ebpfnet"

const bpffs = "/sys/fs/bpf"

// Names of the hooks, which are those of their programs in bpf/datapath.c.
const (
	fromContainer = "from_container"
	toContainer   = "to_container"
	fromUplink    = "from_uplink"
	toUplink      = "to_uplink"
	toLoopback    = "to_loopback"
)

// hooks are all of them.
var hooks = []string{fromContainer, toContainer, fromUplink, toUplink, toLoopback}

// configPin is the pinned .rodata: bpffs allows no dot in a name.
const configPin = "config"

// stateDir is the directory of one host network namespace, which holds three:
// maps, progs and links. In progs is a directory for the build of programs that
// maps/config names; another one is what an upgrade has not finished. All paths
// of pins are made here.
type stateDir string

func (d stateDir) maps() string             { return filepath.Join(string(d), "maps") }
func (d stateDir) progs() string            { return filepath.Join(string(d), "progs") }
func (d stateDir) links() string            { return filepath.Join(string(d), "links") }
func (d stateDir) mapPin(n string) string   { return filepath.Join(d.maps(), n) }
func (d stateDir) linkPin(t target) string  { return filepath.Join(d.links(), t.pin) }
func (d stateDir) temporary(pid int) string { return fmt.Sprintf("%s-%d", tempPrefix(d), pid) }

func (d stateDir) progsOf(build uint64) string {
	return filepath.Join(d.progs(), fmt.Sprintf("%016x", build))
}

func (d stateDir) progPin(build uint64, n string) string { return filepath.Join(d.progsOf(build), n) }

func tempPrefix(d stateDir) string { return filepath.Join(Root, "tmp-"+filepath.Base(string(d))) }

// netnsDir returns the directory of the calling thread's network namespace. It
// is named by the namespace's cookie, which no other gets until the next boot,
// when bpffs is empty. Kernels before 5.14 tell no cookie: there the inode
// number serves, which a later namespace can get when this one is gone.
func netnsDir() (stateDir, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open a socket to identify the network namespace: %w", err)
	}
	defer unix.Close(fd)

	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err == nil {
		return stateDir(fmt.Sprintf("%s/netns-%d", Root, cookie)), nil
	}
	if !errors.Is(err, unix.ENOPROTOOPT) {
		return "", fmt.Errorf("get the network namespace's cookie: %w", err)
	}
	var stat unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &stat); err != nil {
		return "", &os.PathError{Op: "stat", Path: "/proc/thread-self/ns/net", Err: err}
	}
	return stateDir(fmt.Sprintf("%s/netns-i%d", Root, stat.Ino)), nil
}

// NetnsName names the calling thread's network namespace, as the directory of its pins is named.
func NetnsName() (string, error) {
	dir, err := netnsDir()
	return filepath.Base(string(dir)), err
}

// ensureBPFFS mounts the BPF file system where the host has not.
func ensureBPFFS() error {
	mounted, err := isBPFFS(bpffs)
	if err != nil {
		return fmt.Errorf("%w: %s: %w (is the kernel built with CONFIG_BPF_SYSCALL, and /sys mounted?)", ErrNotSupported, bpffs, err)
	}
	if mounted {
		return nil
	}
	if err := unix.Mount("bpf", bpffs, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("%w: mount the BPF file system on %s: %w (mount it by `mount -t bpf bpf %s`)", ErrNotSupported, bpffs, err, bpffs)
	}
	return nil
}

func isBPFFS(path string) (bool, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(path, &stat); err != nil {
		return false, err
	}
	return uint32(stat.Type) == unix.BPF_FS_MAGIC, nil
}
