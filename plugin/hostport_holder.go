package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/prometheus/procfs"
)

// holders maps a socket's name to the name of the process that has it, or to "" if that process
// reserves the port for the container.
type holders map[string]string

// unknownHolder stands for a process that is not visible here, or that has ended.
const unknownHolder = "an unknown process"

// of returns the name of the first process that has one of the sockets for itself.
func (h holders) of(sockets []socket) (name string, found bool) {
	if len(sockets) == 0 {
		return unknownHolder, true
	}
	for _, socket := range sockets {
		if name := h[socket.name]; name != "" {
			return name, true
		}
	}
	return "", false
}

// findHolders looks for sockets among the files of all processes.
func findHolders(fs procfs.FS, sockets []socket, containerID string) holders {
	found := holders{}
	for _, socket := range sockets {
		found[socket.name] = unknownHolder
	}
	processes, err := fs.AllProcs()
	if err != nil {
		return found
	}
	ancestors := ancestorsOf(fs, os.Getpid())
	for _, process := range processes {
		held := found.heldBy(process)
		if len(held) == 0 {
			continue
		}
		name := ""
		if !ancestors[process.PID] && !isConmon(fs, process, containerID) {
			comm, _ := process.Comm()
			name = fmt.Sprintf("%s (pid %d)", comm, process.PID)
		}
		for _, socket := range held {
			found[socket] = name
		}
	}
	return found
}

// heldBy returns the sockets that a process has, without those that are known to reserve a port: a
// runtime's children may have them, too.
func (h holders) heldBy(process procfs.Proc) []string {
	targets, err := process.FileDescriptorTargets()
	if err != nil {
		return nil // gone, or no permission
	}
	return slices.DeleteFunc(targets, func(target string) bool { return h[target] == "" })
}

// ancestorsOf returns a process and its ancestors: podman reserves a new container's ports by
// listening. Process 1 is every process's ancestor and may listen for others, as systemd does: it
// counts only as the direct parent, as with a podman that is a container's process 1.
func ancestorsOf(fs procfs.FS, pid int) map[int]bool {
	ancestors := map[int]bool{os.Getppid(): true}
	for pid > 1 {
		ancestors[pid] = true
		process, err := fs.Proc(pid)
		if err != nil {
			break
		}
		stat, err := process.Stat()
		if err != nil {
			break
		}
		pid = stat.PPID
	}
	return ancestors
}

// isConmon reports whether a process is the container's conmon, to which podman passes the reserved
// ports. conmon outlives podman, so it is not an ancestor. Any process can have its name and
// arguments, so the process must run as root, from a file of root, outside of containers.
func isConmon(fs procfs.FS, process procfs.Proc, containerID string) bool {
	args, err := process.CmdLine()
	option := slices.Index(args, "-c")
	if err != nil || option < 0 || !slices.Equal(args[option+1:min(option+2, len(args))], []string{containerID}) {
		return false
	}
	status, err := process.NewStatus()
	if err != nil || status.UIDs != [4]uint64{} {
		return false
	}
	return hasRootsExecutable(process, "conmon") && isOnHost(fs, process)
}

// hasRootsExecutable reports whether a process runs a file of this name that only root can write.
// An upgrade may have deleted the file.
func hasRootsExecutable(process procfs.Proc, name string) bool {
	path, err := process.Executable()
	if err != nil || filepath.Base(strings.TrimSuffix(path, " (deleted)")) != name {
		return false
	}
	info, err := os.Stat(filepath.Join(procfs.DefaultMountPoint, fmt.Sprint(process.PID), "exe"))
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o022 == 0 && info.Sys().(*syscall.Stat_t).Uid == 0
}

// isOnHost reports whether a process has the user, mount and PID namespaces of this process or of
// process 1.
func isOnHost(fs procfs.FS, process procfs.Proc) bool {
	its, err := process.Namespaces()
	if err != nil {
		return false
	}
	for _, pid := range []int{os.Getpid(), 1} {
		host, err := fs.Proc(pid)
		if err != nil {
			continue
		}
		ours, err := host.Namespaces()
		if err == nil && its["user"] == ours["user"] && its["mnt"] == ours["mnt"] && its["pid"] == ours["pid"] {
			return true
		}
	}
	return false
}
