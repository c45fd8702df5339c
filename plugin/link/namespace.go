package link

import (
	"fmt"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// namespaceFiles are the files by which a network namespace can be opened: runtimes
// bind-mount them, and each process has one.
var namespaceFiles = []string{"/run/netns/*", "/run/docker/netns/*", "/proc/[0-9]*/ns/net"}

// NamespaceOfPeer returns the network namespace of the other end of a pair. The caller
// must close it.
func NamespaceOfPeer(host *netlink.Handle, device netlink.Link) (netns.NsHandle, error) {
	wanted := device.Attrs().NetNsID
	seen := map[string]bool{}
	for _, pattern := range namespaceFiles {
		files, _ := filepath.Glob(pattern) // the patterns are right
		for _, file := range files {
			ns, err := netns.GetFromPath(file)
			if err != nil {
				continue // the process has ended
			}
			if seen[ns.UniqueId()] {
				ns.Close()
				continue
			}
			seen[ns.UniqueId()] = true
			if id, err := host.GetNetNsIdByFd(int(ns)); err == nil && id >= 0 && id == wanted {
				return ns, nil
			}
			ns.Close()
		}
	}
	return netns.None(), fmt.Errorf("find the network namespace of the container behind %s: none of %v is it", device.Attrs().Name, namespaceFiles)
}
