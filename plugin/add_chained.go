package plugin

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// After another plugin, ebpfnet works on the interface that that plugin has made, with the addresses
// of its result, which it passes on as it is. The device and the addresses remain that plugin's.

// findInterface takes the interface and its addresses from prevResult.
func (a *adder) findInterface(context.Context) error {
	prev, name := a.config.PrevResult, a.config.Attachment.IfName
	index := config.InterfaceOf(prev, name)
	if index < 0 && a.config.ResultHasInterfaces() {
		return cnierr.Invalid("prevResult.interfaces", prev.Interfaces,
			"one named "+name+` with a sandbox, or "ipam", with which ebpfnet makes the interface itself`)
	}
	var err error
	if a.pair, err = a.findPair(name); err != nil {
		return err
	}
	if err := a.config.CheckChainedMAC(a.pair.ContainerMAC); err != nil {
		return err
	}
	a.routeTo = map[netip.Addr]int{}
	for _, ip := range prev.IPs {
		if ip.Interface != nil && *ip.Interface != index {
			continue
		}
		address := link.Address{Prefix: link.PrefixOf(ip.Address)}
		route, err := link.RouteTo(a.host, address.Prefix.Addr())
		if err != nil {
			return err
		}
		if route.Gateway.IsValid() {
			return cnierr.Unsupported("prevResult.ips", address.Prefix.Addr(), fmt.Sprintf(
				"the host has no link to the address, and its route leads to %s; give the bridge an address, as its isGateway does", route.Gateway))
		}
		a.routeTo[address.Prefix.Addr()] = route.Device
		gateway, ok := netip.AddrFromSlice(ip.Gateway)
		if !ok {
			gateway = route.Source // the host's own address on that route
		}
		address.Gateway = gateway.Unmap()
		a.addresses = append(a.addresses, address)
	}
	return nil
}

// findPair returns the veth pair of the container's interface. Only a veth passes all packets
// through a device of the host, where programs can be attached.
func (a *adder) findPair(name string) (link.Pair, error) {
	inside, err := link.Find(a.container.Netlink, name)
	if err != nil {
		return link.Pair{}, err
	}
	if inside == nil {
		return link.Pair{}, cnierr.Invalid("prevResult.interfaces", name, "an interface that the container has")
	}
	if _, ok := inside.(*netlink.Veth); !ok {
		return link.Pair{}, cnierr.Unsupported("prevResult.interfaces", name, fmt.Sprintf(
			"it is a %s, whose packets pass no device of the host; ebpfnet can follow plugins that make a veth, like bridge and ptp", inside.Type()))
	}
	outside, err := link.Device(a.host, inside.Attrs().ParentIndex)
	if err != nil {
		return link.Pair{}, err
	}
	if outside == nil || outside.Attrs().ParentIndex != inside.Attrs().Index || outside.Attrs().NetNsID < 0 {
		return link.Pair{}, notOnHost(name)
	}
	// A third namespace's device may have the number of a host's device, which leads to another container.
	if elsewhere, err := link.LeadsElsewhere(a.host, outside, a.container.NS); err != nil || elsewhere {
		return link.Pair{}, cmp.Or(err, notOnHost(name))
	}
	return link.Pair{
		HostName:      outside.Attrs().Name,
		HostIndex:     outside.Attrs().Index,
		HostMAC:       outside.Attrs().HardwareAddr,
		ContainerName: name,
		ContainerMAC:  inside.Attrs().HardwareAddr,
		MTU:           inside.Attrs().MTU,
		Bridge:        outside.Attrs().MasterIndex,
	}, nil
}

func notOnHost(name string) error {
	return cnierr.Invalid("prevResult.interfaces", name, "a veth whose other end is on the host")
}

// checkBridge refuses the device that leads to a container if it is an uplink of the host: as a bridge of containers, it would
// lose its programs. A known bridge of containers is not checked again.
func (a *adder) checkBridge(index int) error {
	known, isKnown, err := maps.GetUplink(a.datapath, index)
	if err != nil || known.ContainerBridge {
		return err
	}
	device, err := link.Device(a.host, index)
	if err != nil || device == nil {
		return err
	}
	if chosen := refresh.Matcher(a.config.Uplinks); !isKnown && chosen != nil && !chosen(device) {
		return nil
	}
	why, err := link.FacesOut(a.host, device)
	if err != nil || why == "" {
		return err
	}
	return cnierr.Unsupported("prevResult.interfaces", a.pair.ContainerName, fmt.Sprintf(
		"the host reaches it by %s, which %s: an uplink cannot be a bridge of containers, too; give them a bridge of their own",
		device.Attrs().Name, why))
}
