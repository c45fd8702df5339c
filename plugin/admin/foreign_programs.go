package admin

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// programsBefore returns the programs of other tools that run before ours on what a device receives: at
// the host's end of a container's veth, or at an uplink. That is allowed, but ours never sees a packet
// unless they return TCX_NEXT or TC_ACT_UNSPEC for it. ours are the names of our programs; canBeTCX says
// whether they may be attached by tcx there.
func programsBefore(host *netlink.Handle, ifindex int, canBeTCX bool, ours ...string) ([]string, error) {
	before, found, err := tcxBefore(ifindex, canBeTCX, ours)
	if err != nil || found {
		return before, err
	}
	filters, found, err := filtersBefore(host, ifindex, ours)
	if !found {
		return nil, err // ours is missing, which CHECK reports
	}
	return append(before, filters...), err
}

// tcxBefore returns the tcx programs before ours, in the order they run. Where ours is a filter, all of them
// are.
func tcxBefore(ifindex int, canBeOurs bool, ours []string) (programs []string, found bool, err error) {
	all, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) { // before 6.6, or the device is gone
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("query the programs of device %d: %w", ifindex, err)
	}
	for _, attached := range all.Programs {
		name, err := loader.ProgramName(attached.ID)
		if errors.Is(err, fs.ErrNotExist) {
			name, err = "gone", nil
		}
		if err != nil {
			return nil, false, err
		}
		if canBeOurs && slices.Contains(ours, name) {
			return programs, true, nil
		}
		programs = append(programs, fmt.Sprintf("%s (program %d)", name, attached.ID))
	}
	return programs, false, nil
}

// filtersBefore returns the tc filters before ours in the order they run. found is false where ours
// is missing.
func filtersBefore(host *netlink.Handle, ifindex int, ours []string) (before []string, found bool, err error) {
	device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	filters, err := rtnl.Filters(host, device, netlink.HANDLE_MIN_INGRESS)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) { // no qdisc, or no device
		return nil, false, nil
	}
	for _, filter := range filters {
		program, ok := filter.(*netlink.BpfFilter)
		if ok && slices.Contains(ours, program.Name) {
			return before, true, err
		}
		name := filter.Type() + " filter"
		if ok {
			name = program.Name
		}
		before = append(before, fmt.Sprintf("%s (tc priority %d)", name, filter.Attrs().Priority))
	}
	return nil, false, err
}
