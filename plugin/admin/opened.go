package admin

import (
	"errors"
	"fmt"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
)

// maxOpened bounds the connections that a change of policy writes for one container.
const maxOpened = 4096

// admitReplies lets the connections of a container continue that its rules admit, when a direction of it
// becomes isolated. Connections of a container with a network stack of its own, as in a virtual machine,
// cannot be seen.
func (o *Host) admitReplies(store *maps.Store, device maps.Device) error {
	_, ns, err := pairOf(o.host, device.IfIndex)
	if err != nil {
		return err
	}
	defer ns.Close()

	opened, accepted, err := namespace.Connections(ns)
	if err != nil {
		return err
	}
	err = errors.Join(
		store.AdmitReplies(device.Owner, maps.OpenedByContainer, connections(opened)),
		store.AdmitReplies(device.Owner, maps.OpenedByRemote, connections(accepted)),
	)
	if n := len(opened) + len(accepted); err == nil && max(len(opened), len(accepted)) > maxOpened {
		err = fmt.Errorf("it has %d, and at most %d of each direction are kept", n, maxOpened)
	}
	return err
}

func connections(sockets []namespace.Connection) (list []maps.Connection) {
	for _, c := range sockets[:min(len(sockets), maxOpened)] {
		list = append(list, maps.Connection{Protocol: maps.Protocol(c.Protocol), Local: c.Local, Remote: c.Remote})
	}
	return list
}
