package plugin

import (
	"net/netip"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// prevResult is the result of the whole list, including the changes of later plugins. So it says what the
// container must have. The datapath and the reservations say what the host must have for the container.

// expect reads from prevResult what the container's interface should have.
func (c *checker) expect() {
	index := config.InterfaceOf(c.config.PrevResult, c.config.Attachment.IfName)
	if index < 0 {
		c.differs("prevResult has no interface %s with a sandbox", c.config.Attachment.IfName)
		return
	}
	c.netInterface = c.config.PrevResult.Interfaces[index]
	for _, ip := range c.config.PrevResult.IPs {
		isOurs := ip.Interface == nil && c.chained != nil || ip.Interface != nil && *ip.Interface == index
		if isOurs {
			gateway, _ := netip.AddrFromSlice(ip.Gateway)
			c.addresses = append(c.addresses, link.Address{Prefix: link.PrefixOf(ip.Address), Gateway: gateway.Unmap()})
		}
	}
}

// checkInterfaces requires that prevResult is this container's: it names no other sandbox, and no device
// of the host that leads to another container.
func (c *checker) checkInterfaces() {
	named := false
	for _, i := range c.config.PrevResult.Interfaces {
		switch {
		case i.Sandbox != "":
			c.checkSandbox(i)
		case c.chained == nil && i.Name == names.HostDevice(c.owner):
			named = true // checkHost compares it
		case i.SocketPath == "" && i.PciID == "": // else no device of the kernel
			c.checkHostInterface(i.Name)
		}
	}
	if c.chained == nil && !named {
		c.differs("prevResult lacks the host's device %s", names.HostDevice(c.owner))
	}
}

func (c *checker) checkSandbox(i *types100.Interface) {
	if i.Sandbox == c.netns {
		return
	}
	sandbox, err := link.OpenNamespace(i.Sandbox)
	if err == nil {
		defer sandbox.Close()
	}
	if err != nil || !sandbox.Equal(c.container.NS) {
		c.differs("sandbox of %q in prevResult: %q, expected the container's, %q", i.Name, i.Sandbox, c.netns)
	}
}

func (c *checker) checkHostInterface(name string) {
	device, err := link.Find(c.host, name)
	if c.failed(err) {
		return
	}
	if device == nil {
		c.differs("the host has no device %q, which prevResult names", name)
		return
	}
	elsewhere, err := link.LeadsElsewhere(c.host, device, c.container.NS)
	if !c.failed(err) && elsewhere {
		c.differs("%s, which prevResult names, leads to another container", name)
	}
}

// findOwn finds the addresses that ADD gave the container: those that the datapath knows as the
// container's. One that it should know is reserved, or is the first of its family and so in the device's
// entry. Any other is a later plugin's.
func (c *checker) findOwn() {
	var first []netip.Addr
	if c.entry.Owner == c.owner {
		first = []netip.Addr{c.entry.Addr4, c.entry.Addr6}
	}
	candidates := slices.Concat(first, c.resultAddrs(), c.reserved)
	seen := map[netip.Addr]bool{}
	for _, addr := range candidates {
		if !addr.IsValid() || seen[addr] {
			continue
		}
		seen[addr] = true
		endpoint, found, err := maps.GetEndpoint(c.datapath, addr)
		switch {
		case c.failed(err):
		case found:
			c.known = append(c.known, endpoint)
		case slices.Contains(first, addr) || slices.Contains(c.reserved, addr) && slices.Contains(c.resultAddrs(), addr):
			c.differs("the datapath does not know %s", addr)
		}
	}
	for _, endpoint := range c.known {
		if endpoint.Owner == c.owner {
			c.own = append(c.own, c.addressOf(endpoint))
		}
	}
}

// addressOf returns an address as ADD gave it to the container, with the prefix length of prevResult.
func (c *checker) addressOf(endpoint maps.Endpoint) link.Address {
	own := link.Address{Prefix: netip.PrefixFrom(endpoint.Addr, endpoint.Addr.BitLen()), Gateway: endpoint.Gateway}
	for _, address := range c.addresses {
		if address.Prefix.Addr() == endpoint.Addr {
			own.Prefix = address.Prefix
		}
	}
	return own
}

// resultAddrs returns the addresses of the container's interface in prevResult.
func (c *checker) resultAddrs() (addrs []netip.Addr) {
	for _, address := range c.addresses {
		addrs = append(addrs, address.Prefix.Addr())
	}
	return addrs
}

// expectedRoutes returns the routes that the container should have. If prevResult has everything that ADD
// reported, they are those of ADD, and the others of prevResult by any device. Otherwise a later plugin
// has changed them, and only those of prevResult count.
func (c *checker) expectedRoutes(ifindex int) []netlink.Route {
	const anyDevice = 0
	ours, others := c.resultRoutes()
	if c.config.IPAM == nil || c.container.IsOwn || len(ours) < len(c.config.IPAM.Routes) || !c.hasOwnAddresses() {
		return c.routesAsReported()
	}
	return append(link.ContainerRoutes(ifindex, c.own, ours), link.ContainerRoutes(anyDevice, nil, others)...)
}

// routesAsReported returns the routes of prevResult, by any device. Those with a gateway of their own have any gateway:
// ADD has sent them to the host, unless another plugin has made the interface.
func (c *checker) routesAsReported() []netlink.Route {
	routes := link.ContainerRoutes(0, nil, c.config.PrevResult.Routes)
	for i, route := range c.config.PrevResult.Routes {
		if _, own := link.OwnGateway(route, c.own); own && c.chained == nil {
			routes[i].Gw = nil
		}
	}
	return routes
}

// resultRoutes returns the routes of prevResult: those that the configuration asks for, and the others.
// The routes of another IPAM plugin are among the others.
func (c *checker) resultRoutes() (ours, others []*cnitypes.Route) {
	var configured []*cnitypes.Route
	if c.config.IPAM != nil {
		configured = c.config.IPAM.Routes
	}
	for _, route := range c.config.PrevResult.Routes {
		isSame := func(r *cnitypes.Route) bool { return r.Dst.String() == route.Dst.String() && r.GW.Equal(route.GW) }
		if slices.ContainsFunc(configured, isSame) {
			ours = append(ours, route)
		} else {
			others = append(others, route)
		}
	}
	return ours, others
}

// hasOwnAddresses reports whether prevResult has all addresses that ADD gave, with their gateways.
func (c *checker) hasOwnAddresses() bool {
	return !slices.ContainsFunc(c.own, func(own link.Address) bool { return !slices.Contains(c.addresses, own) })
}
