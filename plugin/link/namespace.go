package link

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// OpenNamespace opens a network namespace. It opens only regular files, which all namespaces are: opening a FIFO waits
// for its writer, and opening some devices has side effects.
func OpenNamespace(path string) (netns.NsHandle, error) {
	info, err := os.Stat(path)
	if err != nil {
		return netns.None(), err
	}
	if !info.Mode().IsRegular() {
		return netns.None(), errors.New("the file is not a namespace")
	}
	return netns.GetFromPath(path)
}

// InNamespace runs do in another network namespace. Sockets that do opens belong to that namespace, also afterwards. A
// thread sees only the sysctls and the sockets of its own namespace.
func InNamespace(ns netns.NsHandle, do func() error) error {
	return OnThread(func() error {
		if err := netns.Set(ns); err != nil {
			return err
		}
		return do()
	})
}

// OnThread runs do on a thread of its own, which may change its namespace, and ends afterwards.
func OnThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread never ends, and /proc/self shows its namespace
			err := OnThread(do)
			runtime.UnlockOSThread()
			done <- err
			return
		}
		done <- do() // not unlocked: the thread ends with the goroutine
	}()
	return <-done
}

// namespaceFiles are the files through which a network namespace can be opened: bind mounts of runtimes, and one file
// of each process.
var namespaceFiles = []string{"/run/netns/*", "/run/docker/netns/*", "/proc/[0-9]*/ns/net"}

// LeadsElsewhere reports whether a device is the host's end of a pair whose other end is in neither the host's nor the
// given namespace.
func LeadsElsewhere(host *netlink.Handle, device netlink.Link, ns netns.NsHandle) (bool, error) {
	isPair := device.Type() == string(Veth) || device.Type() == string(Netkit)
	peer := device.Attrs().NetNsID
	if !isPair || peer < 0 {
		return false, nil
	}
	id, err := host.GetNetNsIdByFd(int(ns))
	return id != peer, err
}

// NamespaceOfPeer returns the network namespace of the other end of a pair. The caller
// must close it.
func NamespaceOfPeer(host *netlink.Handle, device netlink.Link) (netns.NsHandle, error) {
	isPeers := func(ns netns.NsHandle) bool {
		id, err := host.GetNetNsIdByFd(int(ns))
		return err == nil && id >= 0 && id == device.Attrs().NetNsID
	}
	seen := map[string]bool{} // thousands of processes may have the same one
	for _, pattern := range namespaceFiles {
		files, _ := filepath.Glob(pattern) // the patterns are right
		for _, file := range files {
			ns, err := OpenNamespace(file)
			if err != nil {
				continue // the process has ended
			}
			unique := ns.UniqueId()
			if !seen[unique] && isPeers(ns) {
				return ns, nil
			}
			seen[unique] = true
			ns.Close()
		}
	}
	return netns.None(), fmt.Errorf("find the network namespace of the container behind %s: none of %v is it", device.Attrs().Name, namespaceFiles)
}
