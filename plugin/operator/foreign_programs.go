package operator

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// programsBefore returns the programs of other tools that run before ours on the packets of a
// container, at the host's end of its veth. That is allowed, but ours never sees a packet unless
// they return TCX_NEXT or TC_ACT_UNSPEC for it.
func programsBefore(host *netlink.Handle, ifindex int) ([]string, error) {
	before, err := tcxPrograms(ifindex)
	if err != nil {
		return nil, err
	}
	filters, found, err := filtersBefore(host, ifindex)
	if !found {
		return nil, err // ours is missing, which CHECK reports
	}
	return append(before, filters...), err
}

// tcxPrograms returns the tcx programs of a device. All of them run before ours, which is a filter.
func tcxPrograms(ifindex int) (programs []string, err error) {
	all, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) { // before 6.6, or the device is gone
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("query the programs of device %d: %w", ifindex, err)
	}
	for _, attached := range all.Programs {
		name, err := loader.ProgramName(attached.ID)
		if errors.Is(err, fs.ErrNotExist) {
			name, err = "gone", nil
		}
		if err != nil {
			return nil, err
		}
		programs = append(programs, fmt.Sprintf("%s (program %d)", name, attached.ID))
	}
	return programs, nil
}

// filtersBefore returns the tc filters before ours in the order they run. found is false where ours
// is missing.
func filtersBefore(host *netlink.Handle, ifindex int) (before []string, found bool, err error) {
	device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	filters, err := rtnl.Filters(host, device, netlink.HANDLE_MIN_INGRESS)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) { // no qdisc, or no device
		return nil, false, nil
	}
	for _, filter := range filters {
		program, ok := filter.(*netlink.BpfFilter)
		if ok && program.Name == bpf.ProgFromContainer {
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
