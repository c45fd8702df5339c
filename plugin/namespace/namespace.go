// Package namespace opens a container's network namespace, and netlink there, and lists the connections
// that the container has opened. It never changes the namespace of the calling thread.
package namespace

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Container is a container's network namespace.
type Container struct {
	NS      netns.NsHandle
	Netlink *netlink.Handle
	IsOwn   bool // it is our own
}

// OpenContainer opens the namespace at path. It refuses our own unless orOwn: the CNI library compares
// them only after the verb has run. The caller must call Close.
func OpenContainer(path string, orOwn bool) (*Container, error) {
	ns, err := link.OpenNamespace(path)
	if err != nil {
		return nil, cnierr.InvalidNetns(path, err.Error())
	}
	own, err := netns.GetFromPath("/proc/thread-self/ns/net")
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open our own network namespace: %w", err)
	}
	defer own.Close()

	isOwn := ns.Equal(own)
	if isOwn && !orOwn {
		ns.Close()
		return nil, cnierr.InvalidNetns(path, "this is the host's own network namespace; a runtime that means it sets CNI_NETNS_OVERRIDE=1")
	}
	container, err := NewContainer(ns)
	if err != nil {
		return nil, cnierr.InvalidNetns(path, err.Error())
	}
	container.IsOwn = isOwn
	return container, nil
}

// NewContainer opens routing netlink in a namespace, which it closes on errors. The caller must
// call Close.
func NewContainer(ns netns.NsHandle) (*Container, error) {
	handle, err := rtnl.OpenAt(ns)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("the container's namespace: %w", err)
	}
	return &Container{NS: ns, Netlink: handle}, nil
}

// Close closes the namespace and its netlink handle.
func (c *Container) Close() {
	c.Netlink.Close()
	c.NS.Close()
}
