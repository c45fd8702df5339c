package plugin

import (
	"context"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
)

// checkMaps compares the map entries with the configuration.
func (c *checker) checkMaps() {
	c.checkDeviceEntry()
	var endpoints []maps.Endpoint
	for _, endpoint := range c.known {
		if c.checkEndpoint(endpoint) {
			endpoints = append(endpoints, endpoint)
		}
	}
	c.checkHostPorts(endpoints)
	c.checkGatewayRoutes(endpoints)
}

// checkGatewayRoutes looks for the gateways of the routes that ADD made in the datapath.
func (c *checker) checkGatewayRoutes(endpoints []maps.Endpoint) {
	if c.chained != nil || c.hostDevice == nil {
		return
	}
	for _, endpoint := range endpoints {
		if endpoint.Routes != c.entry.Routes {
			c.differs("the datapath has other routes for %s than for %s", endpoint.Addr, c.hostDevice.Attrs().Name)
		}
	}
	ours, _ := c.resultRoutes()
	expected := gatewayRoutes(c.own, ours, isOn(c.host))
	if len(expected) == 0 {
		return
	}
	sets, err := maps.GatewayRoutes(c.datapath)
	if c.failed(err) {
		return
	}
	for _, route := range expected {
		if route.Gateway.IsValid() && !slices.Contains(sets[c.entry.Routes], route) {
			c.differs("the datapath lacks the container's route to %s", route)
		}
	}
}

// checkPolicy compares the rules that the programs have with the configuration's.
func (c *checker) checkPolicy() {
	policy, err := maps.GetPolicy(c.datapath, c.entry.Policy)
	if c.failed(err) {
		return
	}
	if policy.IsPod {
		return // the node agent's
	}
	present := [2]*maps.RuleSet{}
	if present[0], present[1], err = maps.NewRuleSets(c.datapath).Of(policy); c.failed(err) {
		return
	}
	if policy.Owner != c.owner && c.entry.Policy != 0 {
		c.differs("the datapath has the rules of another container for it")
	}
	ingress, egress := c.config.RuleSets()
	for i, expected := range []*maps.RuleSet{ingress, egress} {
		if !present[i].Equal(expected) {
			c.differs("the datapath has other %s rules than policy, policyMode, and ingressPolicy say", []string{"ingress", "egress"}[i])
		}
	}
}

func (c *checker) checkDeviceEntry() {
	if c.hostDevice == nil {
		return
	}
	c.checkPolicy()
	device := c.entry
	switch {
	case device.Owner != c.owner:
		c.differs("the datapath does not know %s as the container's", c.hostDevice.Attrs().Name)
	case device.AntiSpoof != c.config.AntiSpoof:
		c.differs("antiSpoof is %v, expected %v", device.AntiSpoof, c.config.AntiSpoof)
	case device.Shaped != (c.config.Bandwidth.Ingress.Rate != 0):
		c.differs("the datapath's device entry has an ingress limit: %v, expected %v", device.Shaped, c.config.Bandwidth.Ingress.Rate != 0)
	case device.AntiSpoof && c.netInterface != nil && c.netInterface.Mac != "" && device.MAC.String() != c.netInterface.Mac:
		c.differs("antiSpoof drops all that the container sends: its MAC is %s, and was %s at ADD; set antiSpoof to false, or let ebpfnet set the MAC",
			c.netInterface.Mac, device.MAC)
	}
}

func (c *checker) checkEndpoint(endpoint maps.Endpoint) bool {
	addr := endpoint.Addr
	nonMasq := c.config.Masq.NonMasqFor(addr)
	switch {
	case endpoint.Owner != c.owner:
		c.differs("the datapath knows %s as another container's", addr)
	case c.chained == nil && c.hostDevice != nil && endpoint.IfIndex != c.hostDevice.Attrs().Index:
		c.differs("the datapath has %s behind device %d, expected %s", addr, endpoint.IfIndex, c.hostDevice.Attrs().Name)
	case endpoint.Masq != c.config.Masq.For(addr):
		c.differs("masquerading of %s is %v, expected %v", addr, endpoint.Masq, !endpoint.Masq)
	case endpoint.Tunnels != c.config.Masq.TunnelsFor(addr):
		c.differs("masquerading of tunnels from %s is %v, expected %v (masqTunnels)", addr, endpoint.Tunnels, !endpoint.Tunnels)
	case endpoint.FastPath != c.config.FastPathFor(c.chained != nil):
		c.differs("fastPath of %s is %s, expected %s", addr, endpoint.FastPath, c.config.FastPathFor(c.chained != nil))
	case endpoint.NonMasq != maps.PrefixSetOf(nonMasq):
		c.differs("the datapath has other nonMasqueradeCIDRs for %s than the configuration", addr)
	default:
		missing, err := maps.MissingPrefixes(c.datapath, nonMasq)
		if !c.failed(err) && len(missing) > 0 {
			c.differs("the datapath masquerades %s towards %v, which nonMasqueradeCIDRs names", addr, missing)
		}
		return true
	}
	return false
}

func (c *checker) checkHostPorts(endpoints []maps.Endpoint) {
	entries := c.config.HostPortsFor(endpoints)
	for _, want := range entries {
		c.checkHostPort(want)
	}
	for _, port := range c.config.HostPorts {
		missing, err := maps.MissingPrefixes(c.datapath, port.SrcRanges)
		if !c.failed(err) && len(missing) > 0 {
			c.differs("host port %d is closed to %v, which portSources names", port.HostPort, missing)
		}
	}
	if len(entries) == 0 {
		return
	}
	attached, err := c.datapath.LoopbackAttached()
	if !c.failed(err) && !attached {
		c.differs("the loopback device has lost its BPF program, which gives the host access to host ports" + Repairable)
	}
}

func (c *checker) checkHostPort(want maps.HostPort) {
	port, found, err := maps.GetHostPort(c.datapath, want)
	switch {
	case c.failed(err):
	case !found:
		c.differs("missing host port: %v", want)
	case port != want:
		c.differs("host port: %v, expected %v", port, want)
	}
}

// checkReservations compares the reservations with the datapath's endpoints. A reservation without an
// endpoint must be in prevResult, which findOwn compares.
func (c *checker) checkReservations(ctx context.Context) {
	if c.delegate != nil {
		c.failed(c.delegate.check(ctx))
	}
	if !c.comparesReserved {
		return
	}
	var known []netip.Addr
	for _, endpoint := range c.known {
		known = append(known, endpoint.Addr)
		if !slices.Contains(c.reserved, endpoint.Addr) {
			c.differs("%s is not reserved for the container in %s", endpoint.Addr, c.config.IPAM.Dir())
		}
	}
	for _, addr := range c.reserved {
		if !slices.Contains(known, addr) && !slices.Contains(c.resultAddrs(), addr) {
			c.differs("%s is reserved for the container in %s and missing from prevResult", addr, c.config.IPAM.Dir())
		}
	}
}
