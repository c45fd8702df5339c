package main

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// feature is something that kernels do differently, or not at all.
type feature struct {
	Name   string `json:"name"`
	Chosen string `json:"chosen"`
	Why    string `json:"why"`
}

// features probes the kernel, whatever its version says. What was chosen when the datapath was loaded
// comes from its configuration.
func features(datapath *loader.Datapath) ([]feature, error) {
	chosen, why := "tcx links", "the kernel supports them (6.6)"
	if bpf.Attach(datapath.Config.Attach) != bpf.AttachTCX {
		chosen, why = "clsact filters", "the kernel has no tcx (6.6)"
	}
	source, err := sourceFeature()
	if err != nil {
		return nil, err
	}
	bigTCP, err := bigTCPFeatures(datapath)
	if err != nil {
		return nil, err
	}
	netkit, err := netkitFeature()
	if err != nil {
		return nil, err
	}
	all := []feature{
		{"programs on uplinks and lo", chosen, why},
		{"programs on containers", "clsact filters", "they disappear with their devices and cost less than links"},
		{"programs on other plugins' containers", chosen, why},
		{"fast path to containers", "bpf_redirect_peer", "every supported kernel has it (5.10)"},
		source,
	}
	return append(append(all, bigTCP...), netkit), nil
}

func sourceFeature() (feature, error) {
	known, err := loader.KnowsRouteSource()
	if known {
		return feature{"masquerade address", "source address of each packet's route", "the kernel reports it (6.7)"}, err
	}
	return feature{"masquerade address", "the uplink's address at the last ADD or STATUS", "the kernel does not report that of a route (6.7)"}, err
}

// bigTCPFeatures describes what bigTCP auto gives to the next container.
func bigTCPFeatures(datapath *loader.Datapath) ([]feature, error) {
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()

	known, err := maps.Uplinks(datapath)
	if err != nil {
		return nil, err
	}
	var uplinks []int
	for _, uplink := range known {
		if !uplink.ContainerBridge {
			uplinks = append(uplinks, uplink.IfIndex)
		}
	}
	var all []feature
	for _, family := range []struct {
		name, since string
		largest     link.BigTCP
	}{
		{"BIG TCP, IPv6", "5.19", link.BigTCP{IPv6: link.Largest.IPv6}},
		{"BIG TCP, IPv4", "6.3", link.BigTCP{IPv4: link.Largest.IPv4}},
	} {
		chosen, why, err := bigTCPSize(host, family.largest, uplinks)
		if err != nil {
			return nil, err
		}
		all = append(all, feature{family.name, chosen, why + " (" + family.since + ")"})
	}
	return all, nil
}

// bigTCPSize returns the size of one family's packets, and why it is not another.
func bigTCPSize(host *netlink.Handle, largest link.BigTCP, uplinks []int) (chosen, why string, err error) {
	possible, err := largest.InKernel(host)
	if err != nil || possible == (link.BigTCP{}) {
		return "no", "the kernel does not support it", err
	}
	fits, narrowest, err := possible.Within(host, uplinks)
	size := max(fits.IPv6, fits.IPv4)
	switch {
	case len(uplinks) == 0:
		return "no", "there is no uplink; the kernel supports it", err
	case size == 0:
		return "no", "uplink " + narrowest + " would leave larger packets to the CPU; the kernel supports it", err
	case narrowest != "":
		return fmt.Sprintf("%d bytes", size), "uplink " + narrowest + " takes no more; the kernel supports it", err
	default:
		return fmt.Sprintf("%d bytes", size), "the uplinks and the kernel support it", err
	}
}

// netkitFeature creates a device in a network namespace that ends with its thread.
func netkitFeature() (feature, error) {
	created := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			created <- err
			return
		}
		host, err := rtnl.Open()
		if err != nil {
			created <- err
			return
		}
		defer host.Close()
		created <- host.LinkAdd(&netlink.Netkit{LinkAttrs: netlink.LinkAttrs{Name: "probe"}, Mode: netlink.NETKIT_MODE_L2})
	}()
	err := <-created
	if errors.Is(err, unix.EOPNOTSUPP) {
		return feature{"device auto", "veth", "the kernel has no netkit (6.7 with CONFIG_NETKIT)"}, nil
	}
	return feature{"device auto", "netkit", "the kernel supports it"}, err
}
