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

func (i *inspection) inspectContainer() {
	name := i.config.Attachment.IfName
	device, err := link.Find(i.container.handle, name)
	if i.failed(err) || i.netInterface == nil {
		return
	}
	if device == nil {
		i.differs("the container has no interface %s", name)
		return
	}
	i.compare(device, " in the container", i.netInterface)
	if device.Attrs().Flags&net.FlagUp == 0 {
		i.differs("%s in the container is down", name)
	}
	i.inspectAddresses(device)
	i.inspectRoutes(device)
	i.inspectTuning()
}

// compare is for what a result says of a device. The container's may have a smaller MTU: the
// tuning plugin sets one and does not say so in its result.
func (i *inspection) compare(device netlink.Link, where string, want *types100.Interface) {
	attrs := device.Attrs()
	if want.Mac != "" && attrs.HardwareAddr.String() != want.Mac {
		i.differs("MAC of %s%s: %s, expected %s", attrs.Name, where, attrs.HardwareAddr, want.Mac)
	}
	if want.Mtu != 0 && (attrs.MTU > want.Mtu || attrs.MTU < want.Mtu && want.Sandbox == "") {
		i.differs("MTU of %s%s: %d, expected %d", attrs.Name, where, attrs.MTU, want.Mtu)
	}
}

func (i *inspection) inspectTuning() {
	name := i.config.Attachment.IfName
	present, err := i.config.Tuning.Present(i.container.ns, i.container.handle, name)
	if i.failed(err) {
		return
	}
	for _, difference := range i.config.Tuning.Differences(present) {
		i.differs("%s of %s in the container", difference, name)
	}
}

func (i *inspection) inspectAddresses(device netlink.Link) {
	present, err := link.Addresses(i.container.handle, device)
	if i.failed(err) {
		return
	}
	for _, want := range i.addresses {
		if !slices.Contains(present, want.Prefix) {
			i.differs("%s in the container lacks address %s", device.Attrs().Name, want.Prefix)
		}
	}
}

// inspectRoutes looks for those of prevResult, and for all others that ADD made.
func (i *inspection) inspectRoutes(device netlink.Link) {
	expected := link.ContainerRoutes(device.Attrs().Index, i.addresses, i.config.PrevResult.Routes)
	if i.chained != nil { // the others are of the plugin before
		expected = link.ContainerRoutes(device.Attrs().Index, nil, i.config.PrevResult.Routes)
	}
	for _, want := range expected {
		present, err := link.RoutesTo(i.container.handle, want)
		if i.failed(err) {
			return
		}
		if len(present) == 0 {
			i.differs("the container lacks the route to %s by %s", want.Dst, device.Attrs().Name)
			continue
		}
		var wrong []string
		for _, is := range present {
			if wrong = routeDifferences(is, want); len(wrong) == 0 {
				break
			}
		}
		if len(wrong) > 0 {
			i.differs("the container's route to %s by %s has %s", want.Dst, device.Attrs().Name, strings.Join(wrong, ", "))
		}
	}
}

// routeDifferences compares what was asked for. Another plugin may have added the rest.
func routeDifferences(is, want netlink.Route) (wrong []string) {
	if want.Gw != nil && !want.Gw.Equal(is.Gw) {
		wrong = append(wrong, fmt.Sprintf("gateway %s, expected %s", is.Gw, want.Gw))
	}
	for _, field := range []struct {
		name     string
		is, want int
	}{
		{"mtu", is.MTU, want.MTU}, {"advmss", is.AdvMSS, want.AdvMSS}, {"priority", is.Priority, want.Priority},
	} {
		if field.want != 0 && field.is != field.want {
			wrong = append(wrong, fmt.Sprintf("%s %d, expected %d", field.name, field.is, field.want))
		}
	}
	// IPv6 has no scopes.
	if want.Dst.IP.To4() != nil && want.Scope != netlink.SCOPE_UNIVERSE && is.Scope != want.Scope {
		wrong = append(wrong, fmt.Sprintf("scope %d, expected %d", is.Scope, want.Scope))
	}
	return wrong
}
