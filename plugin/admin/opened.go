package admin

import (
	"fmt"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
)

// maxOpened bounds the connections that a change of policy writes for one container.
const maxOpened = 4096

// admitReplies lets connections that a container has opened continue under a stricter policy.
// Connections of a container with a network stack of its own, as in a virtual machine, cannot be seen.
func (o *Host) admitReplies(store *maps.Store, device maps.Device) error {
	_, ns, err := pairOf(o.host, device.IfIndex)
	if err != nil {
		return err
	}
	defer ns.Close()

	opened, err := namespace.Opened(ns)
	if err != nil {
		return err
	}
	var connections []maps.Connection
	for _, c := range opened[:min(len(opened), maxOpened)] {
		connections = append(connections, maps.Connection{Protocol: maps.Protocol(c.Protocol), Local: c.Local, Remote: c.Remote})
	}
	err = store.AdmitReplies(device.Owner, connections)
	if err == nil && len(opened) > maxOpened {
		err = fmt.Errorf("it has opened %d, and at most %d are kept", len(opened), maxOpened)
	}
	return err
}
