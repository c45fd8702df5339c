package rtnl

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// deleteAtOnce is the number of devices that one request deletes. The kernel waits for all CPUs (synchronize_net) once
// per request: one device takes 10 to 20 ms, 64 take 30 ms. It changes no other device meanwhile, so a request must not
// take much longer than that of one device.
const deleteAtOnce = 64

// DeleteLinks deletes devices by their index. It skips devices that do not exist. all is a list of all the host's
// devices. The handle and the calling thread must be in the same network namespace. It continues after errors.
func DeleteLinks(handle *netlink.Handle, all []netlink.Link, indexes []int) error {
	group := unusedGroup(all)
	var errs []error
	for batch := range slices.Chunk(indexes, deleteAtOnce) {
		errs = append(errs, deleteGroup(handle, group, batch))
	}
	return errors.Join(errs...)
}

// unusedGroup returns a group that no device is in. It is random, so that no other process uses it.
func unusedGroup(all []netlink.Link) uint32 {
	for {
		group := rand.Uint32()
		inUse := func(device netlink.Link) bool { return device.Attrs().Group == group }
		if group != 0 && !slices.ContainsFunc(all, inUse) {
			return group
		}
	}
}

// deleteGroup puts devices into a group, and deletes the group.
func deleteGroup(handle *netlink.Handle, group uint32, indexes []int) error {
	var errs []error
	for _, index := range indexes {
		device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
		if err := handle.LinkSetGroup(device, int(group)); err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("change the group of device %d: %w", index, err))
		}
	}
	request := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	if _, err := request.Execute(unix.NETLINK_ROUTE, 0); err != nil && !errors.Is(err, unix.ENODEV) {
		errs = append(errs, fmt.Errorf("delete devices %v: %w", indexes, err))
	}
	return errors.Join(errs...)
}
