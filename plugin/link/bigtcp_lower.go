package link

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// LowerPackets lowers the sizes of the containers whose host's ends are among the devices and marked by
// SizePackets with larger ones. It returns the names of these ends. Connections that are open keep the
// size that they have begun with.
func LowerPackets(host *netlink.Handle, devices []netlink.Link, isHostEnd func(netlink.Link) bool, fits BigTCP) (lowered []string, err error) {
	larger := map[int][]netlink.Link{} // by the id of the container's namespace
	for _, device := range devices {
		if attrs := device.Attrs(); markOf(attrs).exceeds(fits) && isHostEnd(device) {
			larger[attrs.NetNsID] = append(larger[attrs.NetNsID], device)
		}
	}
	var errs []error
	lower := func(container *netlink.Handle, id int) {
		for _, device := range larger[id] {
			err := lowerPackets(container, device.Attrs(), fits)
			if err == nil {
				lowered = append(lowered, device.Attrs().Name)
			}
			errs = append(errs, err)
		}
		delete(larger, id)
	}
	const own = -1 // the container's end is in the host's namespace
	lower(host, own)
	if len(larger) == 0 {
		return lowered, errors.Join(errs...)
	}
	forEachNamespace(host, func(id int, ns netns.NsHandle) bool {
		if larger[id] != nil {
			container, err := rtnl.OpenAt(ns)
			if err == nil {
				lower(container, id)
				container.Close()
			}
			errs = append(errs, err)
		}
		return len(larger) > 0
	})
	for _, devices := range larger {
		present, err := Device(host, devices[0].Attrs().Index)
		if err == nil && present != nil { // else the container has ended
			err = noNamespace(present)
		}
		errs = append(errs, err)
	}
	return lowered, errors.Join(errs...)
}

// markOf returns the sizes that a container has, by the host's end of its pair.
func markOf(hostEnd *netlink.LinkAttrs) BigTCP {
	return BigTCP{above(hostEnd.GROMaxSize), above(hostEnd.GROIPv4MaxSize)}
}

// lowerPackets lowers the sizes of one container. The mark goes last: who fails here tries again.
func lowerPackets(container *netlink.Handle, hostEnd *netlink.LinkAttrs, fits BigTCP) error {
	sizes := markOf(hostEnd).least(fits)
	sizes.IPv6 = max(sizes.IPv6, defaultSize)
	if hostEnd.GROIPv4MaxSize != 0 { // else the kernel knows none
		sizes.IPv4 = max(sizes.IPv4, defaultSize)
	}
	err := sizes.setGSO(container, deviceOf(hostEnd.ParentIndex))
	if err == nil {
		err = rtnl.SetSizes(hostEnd.Index, sizesOfGRO(sizes))
	}
	if err != nil && !errors.Is(err, unix.ENODEV) { // the container has ended
		return fmt.Errorf("lower the GSO sizes of the container behind %s: %w", hostEnd.Name, err)
	}
	return nil
}
