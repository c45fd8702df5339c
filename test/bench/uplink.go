package main

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// uplink is how the link between node and outside deals with large packets. Only streams depend on it.
type uplink struct {
	name  string
	title string // follows the name of a workload
	// before prepares a setup before the first ADD, after finishes it; both may be nil.
	before, after func(*setup) error
}

const bigUplink = "big-uplink"

var uplinks = []uplink{
	{},
	{bigUplink, ", uplink of raised sizes", (*setup).raiseUplink, (*setup).raiseOthers},
	{"frames", ", uplink without offloads", (*setup).onlyFrames, nil},
}

func (u uplink) isDefault() bool { return u.name == "" }

func uplinkTitle(name string) string {
	for _, u := range uplinks {
		if u.name == name {
			return u.title
		}
	}
	return name
}

// bigTCP is ebpfnet's size of BIG TCP packets.
const bigTCP = 192 << 10

// raiseUplink gives both ends of the link BIG TCP sizes.
func (s *setup) raiseUplink() error {
	return errors.Join(raiseSizes(s.topology.Node, testenv.UplinkName), raiseSizes(s.topology.Outside, testenv.UplinkName))
}

// raiseOthers gives all devices of pods the same sizes, because the kernel forwards larger packets slowly to
// devices with smaller ones. ebpfnet does so itself.
func (s *setup) raiseOthers() error {
	if s.ours {
		return nil
	}
	errs := []error{raiseSizes(s.client.Namespace, testenv.PodIfName), raiseSizes(s.server.Namespace, testenv.PodIfName)}
	for _, ns := range []*testenv.Namespace{s.topology.Node, s.topology.Outside} {
		links, err := rtnl.Links(ns.Netlink())
		if err != nil {
			return err
		}
		for _, link := range links {
			if link.Type() == "veth" || link.Type() == "bridge" {
				errs = append(errs, raiseSizes(ns, link.Attrs().Name))
			}
		}
	}
	return errors.Join(errs...)
}

func raiseSizes(ns *testenv.Namespace, device string) error {
	link, err := ns.Netlink().LinkByName(device)
	if err != nil {
		return err
	}
	for _, set := range []func(netlink.Link, int) error{
		ns.Netlink().LinkSetGSOMaxSize, ns.Netlink().LinkSetGROMaxSize,
		ns.Netlink().LinkSetGSOIPv4MaxSize, ns.Netlink().LinkSetGROIPv4MaxSize,
	} {
		if err := set(link, bigTCP); err != nil {
			return fmt.Errorf("raise sizes of %s in %s: %w", device, ns.Name, err)
		}
	}
	return nil
}

// onlyFrames has the sender segment packets and the receiver not merge them: each end sees single frames.
func (s *setup) onlyFrames() error {
	for _, ns := range []*testenv.Namespace{s.topology.Node, s.topology.Outside} {
		if err := ns.SetOffloads(testenv.UplinkName, false, "gso", "tso", "gro"); err != nil {
			return err
		}
	}
	return nil
}
