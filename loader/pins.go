package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Root is the directory of all pins of ebpfnet, and the file that writers lock.
const Root = bpffs + "/ebpfnet"

const bpffs = "/sys/fs/bpf"

// Names of the hooks; each has the name of its program in bpf/datapath.c.
const (
	fromContainer = "from_container"
	toContainer   = "to_container"
	fromUplink    = "from_uplink"
	toUplink      = "to_uplink"
	toLoopback    = "to_loopback"
)

var hooks = []string{fromContainer, toContainer, fromUplink, toUplink, toLoopback}

// configPin is the pinned .rodata: bpffs allows no dot in a name.
const configPin = "config"

// stateDir is the directory of one host network namespace. Its subdirectories are
// maps, progs and links. progs has one directory for the build that maps/config names;
// a second one belongs to an unfinished upgrade. All paths of pins come from here.
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

// inode returns the inode number of the directory. Each load has its own, which neither a rename nor an upgrade changes.
func (d stateDir) inode() (uint64, error) {
	var stat unix.Stat_t
	err := unix.Stat(string(d), &stat)
	return stat.Ino, err
}

func tempPrefix(d stateDir) string { return filepath.Join(Root, "tmp-"+filepath.Base(string(d))) }

// netnsDir returns the directory of the calling thread's network namespace. Its name
// has the namespace's cookie, which is unique until the next boot empties bpffs.
// Kernels before 5.14 do not report the cookie: there the name has the inode number,
// which a later namespace may reuse.
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

// NetnsName returns the name of the calling thread's network namespace: that of its
// directory in Root.
func NetnsName() (string, error) {
	dir, err := netnsDir()
	return filepath.Base(string(dir)), err
}

// checkRoot refuses a directory of pins that users other than root have created or may use. If the BPF file
// system is open to all users (mode 1777), one of them may have created the directory first, to hold the lock or to
// replace maps and programs. A missing directory is not an error.
func checkRoot() error {
	var root unix.Stat_t
	if err := unix.Lstat(Root, &root); errors.Is(err, unix.ENOENT) {
		return nil
	} else if err != nil {
		return &os.PathError{Op: "lstat", Path: Root, Err: err}
	}
	if root.Uid != 0 {
		return fmt.Errorf("%w: %s belongs to user %d: expected a directory of root (find out what made it, and `rm -r %s`)",
			ErrNotSupported, Root, root.Uid, Root)
	}
	if root.Mode&unix.S_IFMT != unix.S_IFDIR {
		return &os.PathError{Op: "open", Path: Root, Err: unix.ENOTDIR}
	}
	if mode := root.Mode & 0o7777; mode != 0o700 {
		return fmt.Errorf("%w: %s has mode %04o: expected 0700, because others than root could hold its lock (`chmod 0700 %s`)",
			ErrNotSupported, Root, mode, Root)
	}
	return nil
}

// checkBPFFS refuses a BPF file system in which users other than root can replace the directory of the pins.
func checkBPFFS() error {
	var dir unix.Stat_t
	if err := unix.Stat(bpffs, &dir); err != nil {
		return &os.PathError{Op: "stat", Path: bpffs, Err: err}
	}
	if dir.Uid != 0 || dir.Mode&0o022 != 0 && dir.Mode&unix.S_ISVTX == 0 {
		return fmt.Errorf("%w: %s belongs to user %d and has mode %04o: expected root's and 0700, or a sticky bit if others write there too "+
			"(`chown 0 %s && chmod 0700 %s`)", ErrNotSupported, bpffs, dir.Uid, dir.Mode&0o7777, bpffs, bpffs)
	}
	return nil
}

// CheckPins reports whether the BPF file system is mounted. If users other than root could replace the pins, it
// returns an error that wraps ErrNotSupported.
func CheckPins() (mounted bool, err error) {
	mounted, err = isBPFFS(bpffs)
	if err != nil || !mounted {
		return false, err
	}
	return true, errors.Join(checkBPFFS(), checkRoot())
}

// ensureBPFFS mounts the BPF file system, unless it is mounted.
func ensureBPFFS() error {
	mounted, err := isBPFFS(bpffs)
	if err != nil {
		return fmt.Errorf("%w: %s: %w (is the kernel built with CONFIG_BPF_SYSCALL, and /sys mounted?)", ErrNotSupported, bpffs, err)
	}
	if mounted {
		return nil
	}
	if err := unix.Mount("bpf", bpffs, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("%w: mount the BPF file system on %s: %w (mount it with `mount -t bpf bpf %s`)", ErrNotSupported, bpffs, err, bpffs)
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
