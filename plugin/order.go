package plugin

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// programsBefore returns the programs of others that see the packets of a container before ours does,
// at the host's end of its veth. They may do so, and should pass on what is not theirs
// (TCX_NEXT, TC_ACT_UNSPEC): what one ends there, ours does not see.
func programsBefore(host *netlink.Handle, ifindex int) ([]string, error) {
	before, err := tcxPrograms(ifindex)
	if err != nil {
		return nil, err
	}
	filters, found, err := filtersBefore(host, ifindex)
	if !found {
		return nil, err // it is not there, and CHECK says so
	}
	return append(before, filters...), err
}

// tcxPrograms all come before ours, which is a filter.
func tcxPrograms(ifindex int) (programs []string, err error) {
	all, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) { // before 6.6, or gone meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the programs of device %d: %w", ifindex, err)
	}
	for _, attached := range all.Programs {
		name, err := programName(attached.ID)
		if err != nil {
			return nil, err
		}
		programs = append(programs, fmt.Sprintf("%s (program %d)", name, attached.ID))
	}
	return programs, nil
}

func programName(id ebpf.ProgramID) (string, error) {
	program, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, fs.ErrNotExist) {
		return "gone", nil
	}
	if err != nil {
		return "", fmt.Errorf("open program %d: %w", id, err)
	}
	defer program.Close()

	info, err := program.Info()
	if err != nil {
		return "", fmt.Errorf("ask program %d for its name: %w", id, err)
	}
	return info.Name, nil
}

// filtersBefore are those of tc, in the order they run.
func filtersBefore(host *netlink.Handle, ifindex int) (before []string, found bool, err error) {
	device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	filters, err := rtnl.Filters(host, device, netlink.HANDLE_MIN_INGRESS)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) { // no qdisc, or no device
		return nil, false, nil
	}
	for _, filter := range filters {
		program, isBPF := filter.(*netlink.BpfFilter)
		if isBPF && program.Name == bpf.ProgFromContainer {
			return before, true, err
		}
		name := filter.Type() + " filter"
		if isBPF {
			name = program.Name
		}
		before = append(before, fmt.Sprintf("%s (tc priority %d)", name, filter.Attrs().Priority))
	}
	return nil, false, err
}
