package reconcile

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

const (
	protocol = rtnl.NodeProtocol // other routes with it are deleted

	// alias marks our device.
	alias = "ebpfnet-node tunnel"
)

// Datapath has the cluster's maps.
type Datapath interface {
	Tunnel() (maps.Tunnel, error)
	SetTunnel(maps.Tunnel) error // attaches the programs to the device, which must be down
	Nodes() ([]maps.Node, error)
	SetNodes([]maps.Node) error
}

// Host is this host's network namespace. Its methods are for one goroutine.
type Host struct {
	handle *netlink.Handle
	routes *rtnl.NodeRoutes
	dp     Datapath
	device string
}

// Open opens netlink. device is the name of the tunnel device.
func Open(dp Datapath, device string) (*Host, error) {
	handle, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	routes, err := rtnl.OpenNodeRoutes(protocol)
	if err != nil {
		handle.Close()
		return nil, err
	}
	return &Host{handle, routes, dp, device}, nil
}

// Close closes netlink.
func (h *Host) Close() {
	h.handle.Close()
	h.routes.Close()
}

// Look lists external devices and the present state.
func (h *Host) Look() (facts desired.Host, have *Present, err error) {
	links, err := rtnl.Links(h.handle)
	if err != nil {
		return facts, nil, fmt.Errorf("list devices: %w", err)
	}
	all, err := rtnl.Addresses(h.handle, nil, netlink.FAMILY_ALL)
	if err != nil {
		return facts, nil, fmt.Errorf("list addresses: %w", err)
	}
	addresses := map[int][]netip.Prefix{}
	for _, address := range all {
		if prefix := link.PrefixOf(*address.IPNet); !prefix.Addr().IsLinkLocalUnicast() && !prefix.Addr().IsLoopback() {
			addresses[address.LinkIndex] = append(addresses[address.LinkIndex], prefix)
		}
	}
	have = &Present{}
	for _, device := range links {
		attrs := device.Attrs()
		switch {
		case attrs.Alias == alias, attrs.Name == h.device && (have.Device == nil || !have.Device.Ours):
			have.Device = deviceOf(device, addresses[attrs.Index])
		case isExternal(attrs) && len(addresses[attrs.Index]) > 0:
			facts.Links = append(facts.Links, linkOf(attrs, addresses[attrs.Index]))
		}
	}
	if have.Routes, err = h.routes.List(); err != nil {
		return facts, nil, err
	}
	if have.Tunnel, err = h.dp.Tunnel(); err != nil {
		return facts, nil, err
	}
	have.Nodes, err = h.dp.Nodes()
	return facts, have, err
}

// isExternal reports whether a device may lead to other nodes, or have this node's address, as lo may.
func isExternal(attrs *netlink.LinkAttrs) bool {
	_, isContainers := names.ParseAlias(attrs.Alias)
	return attrs.Flags&net.FlagUp != 0 && !isContainers
}

func linkOf(attrs *netlink.LinkAttrs, addresses []netip.Prefix) desired.Link {
	link := desired.Link{Index: attrs.Index, MTU: attrs.MTU, Addresses: addresses}
	if attrs.Flags&net.FlagLoopback != 0 {
		link.MTU = 0 // no path to another node uses it
	}
	return link
}

func deviceOf(link netlink.Link, addresses []netip.Prefix) *Device {
	attrs := link.Attrs()
	d := &Device{
		Index: attrs.Index, Name: attrs.Name, Kind: link.Type(), Ours: attrs.Alias == alias,
		Up: attrs.Flags&net.FlagUp != 0, NoARP: attrs.RawFlags&unix.IFF_NOARP != 0,
		MAC: attrs.HardwareAddr.String(), MTU: attrs.MTU, Addresses: addresses,
	}
	if vxlan, ok := link.(*netlink.Vxlan); ok {
		d.External, d.Port = vxlan.FlowBased, vxlan.Port
	}
	return d
}

// Apply makes changes. It writes the map of nodes after it deletes routes and before it adds others: otherwise packets to
// a node would be masqueraded, and replies dropped. It continues after errors. refused are the routes that the kernel
// refuses because of a Node object: no node can keep this host from reaching the others.
func (h *Host) Apply(c *Changes, want *desired.State, have *Present) (refused []nodestate.Skipped, err error) {
	index, err := h.applyDevice(c, want.Device, have.Device)
	if err != nil {
		return nil, err // no route can be added
	}
	var failed failures
	count := func(err error, route rtnl.NodeRoute) {
		if isRefusal(err) && !route.Unreachable {
			refused = append(refused, nodestate.Skipped{Node: want.NodeOf(route.Prefix), Prefix: route.Prefix.String(), Reason: explain(err, route).Error()})
			return
		}
		failed.add(explain(err, route))
	}
	for _, route := range c.Delete {
		failed.add(h.routes.Delete(route))
	}
	if c.SetNodes {
		if err := h.dp.SetNodes(want.Nodes); err != nil {
			return nil, fmt.Errorf("write the map of nodes: %w", err)
		}
	}
	for _, route := range c.Add {
		if route.Device == 0 && !route.Unreachable {
			route.Device = index
		}
		count(h.routes.Add(route), route)
	}
	for _, route := range c.Replace {
		count(h.routes.Replace(route), route)
	}
	for _, prefix := range c.DeleteAddresses { // after the routes that use them as sources
		failed.add(h.changeAddress(h.handle.AddrDel, index, prefix, "delete"))
	}
	return refused, failed.err()
}

// applyDevice changes the tunnel device and returns its index.
func (h *Host) applyDevice(c *Changes, want *desired.Device, have *Device) (index int, err error) {
	if c.DeleteDevice {
		if err := h.handle.LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: have.Index}}); err != nil {
			return 0, fmt.Errorf("delete device %s: %w", have.Name, err)
		}
	}
	switch {
	case c.CreateDevice:
		index, err = h.create(want)
	case want != nil:
		index = have.Index
	}
	if err == nil && c.SetTunnel {
		err = h.dp.SetTunnel(tunnelOf(want, index))
	}
	if err == nil && c.CreateDevice {
		err = h.set(index, want, &Device{Ours: true})
	} else if err == nil && c.SetDevice {
		err = h.set(index, want, have)
	}
	for _, prefix := range c.AddAddresses {
		if err == nil {
			err = h.changeAddress(h.handle.AddrReplace, index, prefix, "add")
		}
	}
	return index, err
}

// create adds the device with its MAC address, because udev changes an address that the kernel chose.
func (h *Host) create(want *desired.Device) (index int, err error) {
	mac, err := net.ParseMAC(want.MAC)
	if err != nil {
		return 0, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = want.Name, mac, want.MTU
	vxlan := &netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: int(want.Tunnel.Port)}
	switch err := h.handle.LinkAdd(vxlan); {
	case errors.Is(err, unix.EOPNOTSUPP):
		return 0, fmt.Errorf("add device %s: the kernel has no VXLAN (module vxlan): %w", want.Name, err)
	case errors.Is(err, unix.EEXIST):
		return 0, fmt.Errorf("add device %s: another device has the name, or another VXLAN device has UDP port %d: %w", want.Name, want.Tunnel.Port, err)
	case err != nil:
		return 0, fmt.Errorf("add device %s: %w", want.Name, err)
	}
	made, err := h.handle.LinkByName(want.Name)
	if err != nil {
		return 0, fmt.Errorf("find device %s: %w", want.Name, err)
	}
	if err := h.handle.LinkSetAlias(made, alias); err != nil {
		return 0, errors.Join(fmt.Errorf("set the alias of %s: %w", want.Name, err), h.handle.LinkDel(made))
	}
	return made.Attrs().Index, nil
}

// set sets only the attributes that differ: the kernel also reports some changes that change nothing, and each would cause
// another sync. Without ARP the kernel resolves no neighbors; without link-local addresses the device sends no packets of
// its own.
func (h *Host) set(index int, want *desired.Device, have *Device) error {
	const addrGenModeNone = 1 // IN6_ADDR_GEN_MODE_NONE

	mac, err := net.ParseMAC(want.MAC)
	if err != nil {
		return err
	}
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	for _, set := range []struct {
		what    string
		differs bool
		apply   func() error
	}{
		{"alias", !have.Ours, func() error { return h.handle.LinkSetAlias(link, alias) }},
		{"MTU", have.MTU != want.MTU, func() error { return h.handle.LinkSetMTU(link, want.MTU) }},
		{"MAC address", have.MAC != want.MAC, func() error { return h.handle.LinkSetHardwareAddr(link, mac) }},
		{"flag NOARP", !have.NoARP, func() error { return h.handle.LinkSetARPOff(link) }},
		{"IPv6 address generation", !have.Up, func() error { return unlessNoIPv6(h.handle.LinkSetIP6AddrGenMode(link, addrGenModeNone)) }},
		{"flag UP", !have.Up, func() error { return explainUp(h.handle.LinkSetUp(link), want) }},
	} {
		if !set.differs {
			continue
		}
		if err := set.apply(); err != nil {
			return fmt.Errorf("set the %s of %s: %w", set.what, want.Name, err)
		}
	}
	return nil
}

// explainUp names the UDP port, which the device opens when it is set up.
func explainUp(err error, want *desired.Device) error {
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("%w: UDP port %d is in use (`ss -lunp` shows by whom)", err, want.Tunnel.Port)
	}
	return err
}

// unlessNoIPv6 ignores the error of a kernel without IPv6.
func unlessNoIPv6(err error) error {
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil
	}
	return err
}

func (h *Host) changeAddress(change func(netlink.Link, *netlink.Addr) error, index int, prefix netip.Prefix, verb string) error {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	address := &netlink.Addr{
		IPNet: &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())},
		Flags: unix.IFA_F_NODAD, // nobody else can have it
	}
	if prefix.Addr().Is4() {
		address.Flags = 0
	}
	if err := change(link, address); err != nil {
		return fmt.Errorf("%s address %s: %w", verb, prefix, err)
	}
	return nil
}

// isRefusal reports whether the kernel refuses a route for its prefix or gateway, which come from a Node object.
func isRefusal(err error) bool {
	return slices.ContainsFunc([]error{unix.EEXIST, unix.EINVAL, unix.ENETUNREACH, unix.EHOSTUNREACH}, func(refusal error) bool {
		return errors.Is(err, refusal)
	})
}

// explain adds what the kernel's error for a new route means.
func explain(err error, route rtnl.NodeRoute) error {
	switch {
	case errors.Is(err, unix.EEXIST):
		return fmt.Errorf("%w: a route that is not ebpfnet's exists (`ip route show exact %s`)", err, route.Prefix)
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("%w: the kernel has no lightweight tunnels (CONFIG_LWTUNNEL)", err)
	default:
		return err
	}
}

// failures are errors, of which the first few are reported: thousands of routes can fail for one reason.
type failures struct {
	first []error
	more  int
}

func (f *failures) add(err error) {
	const reported = 3

	switch {
	case err == nil:
	case len(f.first) < reported:
		f.first = append(f.first, err)
	default:
		f.more++
	}
}

func (f *failures) err() error {
	if f.more > 0 {
		return errors.Join(append(f.first, fmt.Errorf("and %d more", f.more))...)
	}
	return errors.Join(f.first...)
}
