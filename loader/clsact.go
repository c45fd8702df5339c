package loader

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// clsact attaches programs as tc filters, which disappear with their device. Other
// tools share the clsact qdisc, so it is never removed. Our filters have a priority and
// handle of their own.
type clsact struct{ dir stateDir }

const (
	clsactPriority = 0xeb
	clsactHandle   = 0xeb
)

func (clsact) attach(t target, program *ebpf.Program) error {
	handle, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer handle.Close()

	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: t.ifindex,
		Handle:    netlink.MakeHandle(0xffff, 0),
		Parent:    netlink.HANDLE_CLSACT,
	}}
	err = handle.QdiscAdd(qdisc)
	if errors.Is(err, unix.EEXIST) {
		err = checkQdisc(handle, t)
	}
	if err != nil {
		return fmt.Errorf("add the clsact qdisc: %w", err)
	}
	filter := ourFilter(t)
	filter.Fd = program.FD()
	filter.Name = t.hook
	filter.DirectAction = true
	return handle.FilterReplace(filter)
}

// checkQdisc refuses the qdisc ingress of another tool, which takes filters for egress as such for ingress. It asks once for a
// device, before our first filter.
func checkQdisc(handle *netlink.Handle, t target) error {
	if t.direction == egress && t.hook != toLoopback {
		return nil
	}
	filter, err := filterOn(handle, t.ifindex, t.direction)
	if err != nil || filter != nil {
		return err
	}
	qdiscs, err := rtnl.Qdiscs(handle, &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: t.ifindex}})
	for _, qdisc := range qdiscs {
		if qdisc.Attrs().Parent == netlink.HANDLE_CLSACT && qdisc.Type() != "clsact" {
			return fmt.Errorf("%w: device %d has the qdisc %s of another tool, which has no place for programs: "+
				"put that tool's filters into a clsact qdisc (`tc qdisc del dev DEVICE ingress`, `tc qdisc add dev DEVICE clsact`)",
				ErrNotSupported, t.ifindex, qdisc.Type())
		}
	}
	return err
}

// attached ignores the program of a datapath whose pins were lost.
func (a clsact) attached(t target) (bool, error) {
	handle, err := rtnl.Open()
	if err != nil {
		return false, err
	}
	defer handle.Close()

	filter, err := filterOn(handle, t.ifindex, t.direction)
	if err != nil || filter == nil || filter.Name != t.hook {
		return false, err
	}
	pinned, err := a.dir.pinnedPrograms(t.hook + "*")
	_, isPinned := pinned[ebpf.ProgramID(filter.Id)]
	return isPinned, err
}

// filterOn returns the filter with our priority and handle, or nil if the device, its
// qdisc or the filter does not exist.
func filterOn(handle *netlink.Handle, ifindex int, d direction) (*netlink.BpfFilter, error) {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	filters, err := rtnl.Filters(handle, link, parent(d))
	if isGone(err) {
		return nil, nil
	}
	for _, filter := range filters {
		bpf, ok := filter.(*netlink.BpfFilter)
		if ok && bpf.Priority == clsactPriority && bpf.Handle == clsactHandle {
			return bpf, nil
		}
	}
	return nil, err
}

func (clsact) attachedTargets(nameOf programNamer) ([]target, error) {
	handle, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer handle.Close()

	devices, err := rtnl.Links(handle)
	if err != nil {
		return nil, fmt.Errorf("list the devices: %w", err)
	}
	var attached []target
	for _, device := range devices {
		for _, direction := range []direction{ingress, egress} {
			filter, err := filterOn(handle, device.Attrs().Index, direction)
			if err != nil {
				return nil, fmt.Errorf("list the filters of %s: %w", device.Attrs().Name, err)
			}
			if filter == nil || !slices.Contains(hooks, filter.Name) {
				continue
			}
			program, err := nameOf(ebpf.ProgramID(filter.Id))
			if err != nil {
				return nil, err
			}
			attached = append(attached, target{
				hook: filter.Name, program: program, ifindex: device.Attrs().Index, direction: direction,
			})
		}
	}
	return attached, nil
}

func (clsact) detach(t target) error {
	if t.ifindex == 0 {
		return nil
	}
	handle, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer handle.Close()

	err = handle.FilterDel(ourFilter(t))
	if isGone(err) {
		return nil
	}
	return err
}

// isGone reports whether an error is the kernel's for a device, qdisc or filter that does not exist.
func isGone(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT)
}

func ourFilter(t target) *netlink.BpfFilter {
	return &netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{
		LinkIndex: t.ifindex,
		Parent:    parent(t.direction),
		Priority:  clsactPriority,
		Handle:    clsactHandle,
		Protocol:  unix.ETH_P_ALL,
	}}
}

func parent(d direction) uint32 {
	if d == egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}
