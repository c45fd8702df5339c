package plugin

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// checkForwarding checks what all containers of the host need.
func (c *checker) checkForwarding() {
	off, err := link.ForwardingIsOff(link.Families(c.own))
	if c.failed(err) {
		return
	}
	for _, name := range off {
		c.differs("the host does not forward packets: %s is 0, expected 1"+Repairable, name)
	}
}

func (c *checker) checkHost() {
	device := c.hostDevice
	if device == nil {
		c.differs("the host has no device %s", c.hostDeviceName())
		return
	}
	if c.chained == nil {
		c.checkHostEnd(device)
		c.checkRoutesTo(device)
	}
	if device.Attrs().Flags&net.FlagUp == 0 {
		c.differs("%s is down", device.Attrs().Name)
	}
	attached, err := c.datapath.EndpointAttached(device.Attrs().Index)
	if !c.failed(err) && !attached {
		c.differs("%s has lost its BPF programs"+Repairable, device.Attrs().Name)
	}
	c.checkLimits(device)
	c.checkUplinks()
}

// findHostDevice returns the host's end of the veth, or nil.
func (c *checker) findHostDevice() (netlink.Link, error) {
	if c.chained != nil {
		return link.Device(c.host, c.chained.HostIndex)
	}
	return link.Find(c.host, names.HostDevice(c.owner))
}

// hostDeviceName returns the name of a host's end that is gone.
func (c *checker) hostDeviceName() string {
	if c.chained != nil {
		return fmt.Sprintf("number %d, which was the host's end of the veth", c.chained.HostIndex)
	}
	return names.HostDevice(c.owner)
}

// checkHostEnd checks what ADD gave its own device.
func (c *checker) checkHostEnd(device netlink.Link) {
	attrs := device.Attrs()
	if want := names.Alias(c.config.Attachment); attrs.Alias != want {
		c.differs("alias of %s: %q, expected %q, by which GC finds it", attrs.Name, attrs.Alias, want)
	}
	for _, want := range c.config.PrevResult.Interfaces {
		if want.Sandbox == "" && want.Name == attrs.Name {
			c.compare(device, "", want)
		}
	}
	present, err := link.Addresses(c.host, device)
	if c.failed(err) {
		return
	}
	for _, want := range c.own {
		isGateway := func(p netip.Prefix) bool { return p.Addr() == want.Gateway }
		if want.Gateway.IsValid() && !slices.ContainsFunc(present, isGateway) {
			c.differs("%s lacks the gateway's address %s", attrs.Name, want.Gateway)
		}
	}
}

func (c *checker) checkRoutesTo(device netlink.Link) {
	if c.container.IsOwn {
		return // the host has the container's addresses
	}
	for _, want := range c.own {
		route, err := link.RouteTo(c.host, want.Prefix.Addr())
		if err != nil || route.Device != device.Attrs().Index {
			c.differs("the host has no route to %s by %s", want.Prefix.Addr(), device.Attrs().Name)
		}
	}
}

func (c *checker) checkLimits(outside netlink.Link) {
	inside, err := link.Find(c.container.Netlink, c.config.Attachment.IfName)
	if c.failed(err) || inside == nil {
		return
	}
	b := c.config.Bandwidth
	for _, end := range []struct {
		key    string
		handle *netlink.Handle
		device netlink.Link
		limit  link.Limit
	}{
		{"ingressRate", c.host, outside, b.Ingress},
		{"egressRate", c.container.Netlink, inside, b.Egress},
	} {
		shaped, err := link.IsShaped(end.handle, end.device, end.limit, b.Unshaped)
		if !c.failed(err) && !shaped {
			c.differs("%s is not limited to %s %d (0: no limit)", end.device.Attrs().Name, end.key, end.limit.Rate)
		}
	}
}

func (c *checker) checkUplinks() {
	uplinks, err := maps.Uplinks(c.datapath)
	if c.failed(err) {
		return
	}
	c.checkNewUplinks(uplinks)
	for _, uplink := range uplinks {
		if uplink.ContainerBridge {
			continue
		}
		device, err := link.Device(c.host, uplink.IfIndex)
		if c.failed(err) || device == nil {
			continue
		}
		if warning := link.BridgeNetfilter(device); warning != "" {
			c.log.Warn(warning) // no difference: it depends on the rules
		}
		attached, err := c.datapath.UplinkAttached(uplink.IfIndex)
		if !c.failed(err) && !attached {
			c.differs("uplink %s has lost its BPF programs"+Repairable, device.Attrs().Name)
		}
	}
}

// checkNewUplinks finds devices that the uplinks key selects and that appeared after the last ADD or
// STATUS. Without that key, a new uplink is not a difference.
func (c *checker) checkNewUplinks(known []maps.Uplink) {
	if c.config.Uplinks == nil {
		return
	}
	devices, err := link.List(c.host)
	if c.failed(err) {
		return
	}
	found, err := link.Uplinks(c.host, devices, refresh.Matcher(c.config.Uplinks))
	if c.failed(err) {
		return
	}
	for _, uplink := range found {
		device, err := link.Device(c.host, uplink.Index)
		if c.failed(err) || device == nil {
			continue
		}
		if _, ok := link.HeaderOf(device); !ok {
			continue
		}
		if !slices.ContainsFunc(known, func(u maps.Uplink) bool { return u.IfIndex == uplink.Index }) {
			c.differs("uplink %s is new and has no BPF programs yet"+Repairable, device.Attrs().Name)
		}
	}
}
