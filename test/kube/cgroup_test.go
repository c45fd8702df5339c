package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	cgroupRoot = "/sys/fs/cgroup"
	// cgroupList is a machine's list of the groups of all processes that are in no container.
	cgroupList = "/run/cgroups"
)

// hierarchy is a hierarchy of cgroups. One of version 1 has a name, and the only one of version 2 has none.
type hierarchy struct {
	name   string
	parent string // the directory in which machines have their groups
}

// hierarchies returns those of this host's controllers. With version 1, the parent is this process's group. With version 2
// it is the root: a group with processes, other than the root, cannot have groups with controllers.
func hierarchies() (list []hierarchy, err error) {
	var stat unix.Statfs_t
	if unix.Statfs(cgroupRoot, &stat) == nil && stat.Type == unix.CGROUP2_SUPER_MAGIC {
		return []hierarchy{{"", cgroupRoot}}, nil
	}
	content, err := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(content)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if name := strings.TrimPrefix(fields[1], "name="); name != "" {
			list = append(list, hierarchy{name, filepath.Join(cgroupRoot, name, fields[2])})
		}
	}
	if err == nil && !slices.ContainsFunc(list, func(h hierarchy) bool { return h.name == "memory" }) {
		err = errors.New("no memory controller in a hierarchy of cgroups version 1, and " + cgroupRoot + " is not version 2")
	}
	return list, err
}

// lockCgroups makes this the only cluster on this host: machines of all clusters have the same groups.
func lockCgroups(t *testing.T) {
	t.Helper()
	list, err := hierarchies()
	testenv.Must(t, err)
	dir, err := os.Open(list[0].parent)
	testenv.Must(t, err)
	t.Cleanup(func() { dir.Close() })
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Fatalf("lock %s: %v: another cluster is running on this host (make cluster-down)", dir.Name(), err)
	}
}

// enterCgroups moves this process to groups of its own, and makes these all that it sees.
func enterCgroups(machine string) error {
	list, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range list {
		if err := h.enter(machine); err != nil {
			return err
		}
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("unshare cgroups: %w", err)
	}
	for unix.Unmount("/sys", unix.MNT_DETACH) == nil { // kubelets take the first groups that the table of mounts has
	}
	mounts := [][2]string{{"sysfs", "/sys"}, {"bpf", "/sys/fs/bpf"}}
	if list[0].name != "" {
		mounts = append(mounts, [2]string{"tmpfs", cgroupRoot}) // for the directories of hierarchies
	}
	for _, mount := range mounts {
		if err := unix.Mount(mount[0], mount[1], mount[0], 0, ""); err != nil {
			return fmt.Errorf("mount %s on %s: %w", mount[0], mount[1], err)
		}
	}
	var groups []string
	for _, h := range list {
		group, err := h.mount()
		if err != nil {
			return err
		}
		groups = append(groups, group)
	}
	return os.WriteFile(cgroupList, []byte(strings.Join(groups, "\n")+"\n"), 0o644)
}

// enter moves this process to a new group for the machine.
func (h hierarchy) enter(machine string) error {
	if h.name == "" {
		if err := enableControllers(h.parent); err != nil {
			return fmt.Errorf("%w (a container needs the host's cgroup namespace)", err)
		}
	}
	dir := filepath.Join(h.parent, machine)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if h.name == "cpuset" {
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			value, err := os.ReadFile(filepath.Join(h.parent, file))
			if err := errors.Join(err, os.WriteFile(filepath.Join(dir, file), value, 0o644)); err != nil {
				return err
			}
		}
	}
	return enterCgroup(dir)
}

func enterCgroup(dir string) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0o644); err != nil {
		return fmt.Errorf("move to the group %s: %w", dir, err)
	}
	return nil
}

// mount mounts the hierarchy and returns the group of this process in it. With version 2 that is a group below the
// machine's, whose other groups are those of containers.
func (h hierarchy) mount() (group string, err error) {
	dir, kind, options := filepath.Join(cgroupRoot, h.name), "cgroup", h.name
	switch h.name {
	case "":
		kind = "cgroup2"
	case "systemd":
		options = "none,name=systemd"
	}
	if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mount(kind, dir, kind, 0, options)); err != nil {
		return "", fmt.Errorf("mount %s on %s: %w", kind, dir, err)
	}
	if h.name != "" {
		return dir, nil
	}
	group = filepath.Join(dir, "processes")
	if err := errors.Join(os.Mkdir(group, 0o755), enterCgroup(group)); err != nil {
		return "", err
	}
	return group, enableControllers(dir)
}

// enableControllers lets the groups in a group of version 2 have all of its controllers.
func enableControllers(dir string) error {
	controllers, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	for controller := range strings.FieldsSeq(string(controllers)) {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644))
	}
	return err
}

// removeCgroups removes the groups of a machine, which must have no process any more.
func removeCgroups(machine string) error {
	list, err := hierarchies()
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range list {
		var dirs []string
		_ = filepath.WalkDir(filepath.Join(h.parent, machine), func(path string, entry fs.DirEntry, err error) error {
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
