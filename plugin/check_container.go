package plugin

import (
	"fmt"
	"net"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

func (c *checker) checkContainer() {
	name := c.config.Attachment.IfName
	device, err := link.Find(c.container.Netlink, name)
	if c.failed(err) || c.netInterface == nil {
		return
	}
	if device == nil {
		c.differs("the container has no interface %s", name)
		return
	}
	c.compare(device, " in the container", c.netInterface)
	if device.Attrs().Flags&net.FlagUp == 0 {
		c.differs("%s in the container is down", name)
	}
	c.checkAddresses(device)
	c.checkRoutes(device)
	c.checkTuning()
}

// compare compares a device with its interface in a result. The container's end may have a smaller
// MTU, which the tuning plugin sets without a change of the result.
func (c *checker) compare(device netlink.Link, where string, want *types100.Interface) {
	attrs := device.Attrs()
	if want.Mac != "" && attrs.HardwareAddr.String() != want.Mac {
		c.differs("MAC of %s%s: %s, expected %s", attrs.Name, where, attrs.HardwareAddr, want.Mac)
	}
	if want.Mtu != 0 && (attrs.MTU > want.Mtu || attrs.MTU < want.Mtu && want.Sandbox == "") {
		c.differs("MTU of %s%s: %d, expected %d", attrs.Name, where, attrs.MTU, want.Mtu)
	}
}

func (c *checker) checkTuning() {
	name := c.config.Attachment.IfName
	present, err := c.config.Tuning.Present(c.container.NS, c.container.Netlink, name)
	if c.failed(err) {
		return
	}
	for _, difference := range c.config.Tuning.Differences(present) {
		c.differs("%s of %s in the container", difference, name)
	}
}

func (c *checker) checkAddresses(device netlink.Link) {
	present, err := link.Addresses(c.container.Netlink, device)
	if c.failed(err) {
		return
	}
	for _, want := range c.addresses {
		if !slices.Contains(present, want.Prefix) {
			c.differs("%s in the container lacks address %s", device.Attrs().Name, want.Prefix)
		}
	}
}

func (c *checker) checkRoutes(device netlink.Link) {
	for _, want := range c.expectedRoutes(device.Attrs().Index) {
		present, err := link.RoutesTo(c.container.Netlink, want)
		if c.failed(err) {
			return
		}
		if len(present) == 0 {
			c.differs("the container lacks the route to %s", want.Dst)
			continue
		}
		var wrong []string
		for _, route := range present {
			if wrong = routeDifferences(route, want); len(wrong) == 0 {
				break
			}
		}
		if len(wrong) > 0 {
			c.differs("the container's route to %s has %s", want.Dst, strings.Join(wrong, ", "))
		}
	}
}

// routeDifferences compares what was asked for. Another plugin may have set the rest. The MTU may be smaller, as that of
// the device to the gateway.
func routeDifferences(route, want netlink.Route) (wrong []string) {
	if want.Gw != nil && !want.Gw.Equal(route.Gw) {
		wrong = append(wrong, fmt.Sprintf("gateway %s, expected %s", route.Gw, want.Gw))
	}
	if want.MTU != 0 && (route.MTU == 0 || route.MTU > want.MTU) {
		wrong = append(wrong, fmt.Sprintf("mtu %d, expected %d", route.MTU, want.MTU))
	}
	for _, field := range []struct {
		name      string
		got, want int
	}{
		{"advmss", route.AdvMSS, want.AdvMSS}, {"priority", route.Priority, want.Priority},
	} {
		if field.want != 0 && field.got != field.want {
			wrong = append(wrong, fmt.Sprintf("%s %d, expected %d", field.name, field.got, field.want))
		}
	}
	// IPv6 has no scopes.
	if want.Dst.IP.To4() != nil && want.Scope != netlink.SCOPE_UNIVERSE && route.Scope != want.Scope {
		wrong = append(wrong, fmt.Sprintf("scope %d, expected %d", route.Scope, want.Scope))
	}
	return wrong
}
