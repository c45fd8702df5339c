package trace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// hostSource returns the address that the host sends from to another one.
func (w *walker) hostSource(to netip.Addr) (netip.Addr, error) {
	route, err := w.routeTo(to)
	if w.isUnassigned(to) {
		return End{Host: true}.address(to.Is6()), nil
	}
	if err != nil {
		return netip.Addr{}, err
	}
	source, ok := netip.AddrFromSlice(route.Src)
	if !ok {
		return netip.Addr{}, fmt.Errorf("the host has no address for its route to %s", to)
	}
	return source.Unmap(), nil
}

// routeTo returns the host's own route to an address.
func (w *walker) routeTo(to netip.Addr) (netlink.Route, error) {
	return w.route(to, &netlink.RouteGetOptions{})
}

// routeFrom returns the route of a packet that a device has received. The kernel also checks its source.
func (w *walker) routeFrom(to, from netip.Addr, device int) (netlink.Route, error) {
	return w.route(to, &netlink.RouteGetOptions{IifIndex: device, SrcAddr: from.AsSlice()})
}

func (w *walker) route(to netip.Addr, options *netlink.RouteGetOptions) (netlink.Route, error) {
	routes, err := w.host.RouteGetWithOptions(to.AsSlice(), options)
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if errors.Is(err, unix.EXDEV) {
		err = fmt.Errorf("%w (rp_filter)", err)
	}
	if err != nil {
		return netlink.Route{}, fmt.Errorf("the kernel has no route to %s: %w", to, err)
	}
	return routes[0], nil
}

// toStack is the packet that the stack has received by a device.
func (w *walker) toStack(p packet, in int, tag uint32) error {
	w.at("stack", in)
	route, err := w.routeFrom(p.dst.Addr(), p.src.Addr(), in)
	if err != nil {
		return w.noRoute(p, err)
	}
	if route.Type == unix.RTN_LOCAL {
		w.step("route", "%s is an address of the host", p.dst.Addr())
		return w.deliverToHost(p)
	}
	return w.leaveStack(p, route, in, tag)
}

// fromHost is a packet of the host's own.
func (w *walker) fromHost(p packet) error {
	w.hook, w.on = "stack", "host"
	route, err := w.routeTo(p.dst.Addr())
	if err != nil {
		return w.noRoute(p, err)
	}
	if route.Type == unix.RTN_LOCAL || route.LinkIndex == loopback {
		w.step("route", "%s is an address of the host", p.dst.Addr())
		p.build(make(net.HardwareAddr, 6), make(net.HardwareAddr, 6))
		return w.toLoopback(p)
	}
	p.build(w.mac(route.LinkIndex), make(net.HardwareAddr, 6))
	return w.leaveStack(p, route, 0, 0)
}

// isUnassigned reports whether the host refuses packets to an address because no container has it.
func (w *walker) isUnassigned(addr netip.Addr) bool {
	unassigned, _ := rtnl.IsUnassigned(w.host, addr) // or the error for a missing route says enough
	return unassigned
}

func (w *walker) noRoute(p packet, err error) error {
	if w.isUnassigned(p.dst.Addr()) {
		w.step("route", "unreachable: no container has %s", p.dst.Addr())
		return w.drop("no container has %s: the host's stack refuses the packet, and its sender gets an ICMP error", p.dst.Addr())
	}
	w.step("route", "%v: see `ebpfnetctl doctor`", err)
	return w.drop("the host's stack drops it: %v", err)
}

// leaveStack is the packet that the stack sends by a route.
func (w *walker) leaveStack(p packet, route netlink.Route, in int, tag uint32) error {
	w.reportRoute(route, p.dst.Addr())
	if in != 0 {
		w.reportFirewall()
	}
	out := route.LinkIndex
	if e, ok := w.endpoints[p.dst.Addr()]; ok && w.above(e.IfIndex) == out { // a port of the bridge
		out = e.IfIndex
	}
	_, isContainer := w.devices[out]
	switch {
	case isContainer:
		return w.toContainer(p, out, in, tag)
	case w.uplinks[out]:
		return w.toUplink(p, out, in, tag)
	default: // no program of ebpfnet is there
		return w.send(p, out)
	}
}

// reportRoute adds the kernel's route to an address, and the neighbor.
func (w *walker) reportRoute(route netlink.Route, to netip.Addr) {
	hop, family := to, netlink.FAMILY_V6
	if gateway, ok := netip.AddrFromSlice(route.Gw); ok {
		hop = gateway.Unmap()
	}
	if hop.Is4() {
		family = netlink.FAMILY_V4
	}
	mtu := route.MTU
	if l := w.links[route.LinkIndex]; mtu == 0 && l != nil {
		mtu = l.Attrs().MTU
	}
	w.step("route", "by %s, next hop %s, MTU %d", w.linkName(route.LinkIndex), hop, mtu)
	mac := "not resolved"
	neighbors, _ := rtnl.Neighbors(w.host, route.LinkIndex, family) // the next packet resolves it
	for _, n := range neighbors {
		if n.IP.Equal(hop.AsSlice()) && len(n.HardwareAddr) > 0 && n.State != netlink.NUD_FAILED {
			mac = n.HardwareAddr.String()
		}
	}
	w.step("neighbor", "%s: %s", hop, mac)
}

// reportFirewall names the chains that may drop what the host forwards.
func (w *walker) reportFirewall() {
	if w.rules == nil {
		w.rules = firewall.Read(w.ctx)
	}
	for _, chain := range w.rules.Forward {
		if chain.Drops != "" {
			w.step("firewall", "%s drops what no rule accepts: %s", chain, chain.Drops)
		}
	}
	for _, what := range w.rules.Unread {
		w.step("firewall", "not all rules could be read: %s", what)
	}
}
