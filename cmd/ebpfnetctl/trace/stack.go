package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

// hostSource returns the address that the host sends from to another one.
func hostSource(to netip.Addr) (netip.Addr, error) {
	host, err := rtnl.Open()
	if err != nil {
		return netip.Addr{}, err
	}
	defer host.Close()

	route, err := (&walker{host: host}).routeTo(to)
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
	routes, err := w.host.RouteGet(to.AsSlice())
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		return netlink.Route{}, fmt.Errorf("the host has no route to %s: %w", to, err)
	}
	return routes[0], nil
}

// routeFrom returns what the kernel would do with a packet that a device has received: also check its source.
func (w *walker) routeFrom(to, from netip.Addr, device int) (netlink.Route, error) {
	routes, err := w.host.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{IifIndex: device, SrcAddr: from.AsSlice()})
	if err == nil && len(routes) == 0 {
		err = unix.ENETUNREACH
	}
	if err != nil {
		return netlink.Route{}, err
	}
	return routes[0], nil
}

// tag returns the usual tag of what a program leaves to the stack.
func (w *walker) tag(p packet, in int) uint32 {
	return maps.TupleTag(w.copy.Config, maps.Tuple(p.protocol, p.src, p.dst, in, p.isReply))
}

// byStack is the packet that the stack has received by a device.
func (w *walker) byStack(p packet, in int, tag uint32) error {
	w.at("stack", in)
	route, err := w.routeFrom(p.dst.Addr(), p.src.Addr(), in)
	if err != nil {
		why := w.whyNoRoute(err, p, in)
		w.tell("route", "", "%s", why)
		return w.end(Dropped, "the host's stack drops it: %s", why)
	}
	if route.Type == unix.RTN_LOCAL {
		w.tell("route", "", "%s is an address of the host", p.dst.Addr())
		return w.toHost(p)
	}
	out := w.outOf(route, p.dst.Addr())
	w.tellNextHop(route, p.dst.Addr())
	if !w.forwards(p.dst.Addr()) {
		w.tell("forwarding", "", "off: see `ebpfnetctl doctor`")
		return w.end(Dropped, "the host's stack drops it: forwarding is off")
	}
	if ended := w.filtered(p, in, route.LinkIndex); ended {
		return nil
	}
	return w.output(p.forwarded(w.mac(out), w.neighborMAC(p.dst.Addr())), out, in, tag)
}

// whyNoRoute explains an error of the kernel's.
func (w *walker) whyNoRoute(err error, p packet, in int) string {
	switch {
	case errors.Is(err, unix.EXDEV):
		return fmt.Sprintf("rp_filter: the host would not send to %s by %s", p.src.Addr(), w.linkName(in))
	case errors.Is(err, unix.EINVAL):
		return fmt.Sprintf("it does not accept %s as a source, or %s as a destination", p.src.Addr(), p.dst.Addr())
	case errors.Is(err, unix.EHOSTUNREACH) && !w.forwards(p.dst.Addr()):
		return "forwarding is off: see `ebpfnetctl doctor`"
	default:
		return fmt.Sprintf("no route to %s: %v", p.dst.Addr(), err)
	}
}

// outOf returns the device by which a packet leaves: of a bridge, the container's port.
func (w *walker) outOf(route netlink.Route, to netip.Addr) int {
	if e, ok := w.endpoints[to]; ok && w.above(e.IfIndex) == route.LinkIndex {
		return e.IfIndex
	}
	return route.LinkIndex
}

func (w *walker) neighborMAC(to netip.Addr) []byte {
	if e, ok := w.endpoints[to]; ok {
		return e.MAC
	}
	return make([]byte, 6)
}

// tellNextHop tells device, gateway, and the longest packet.
func (w *walker) tellNextHop(route netlink.Route, to netip.Addr) {
	hop := to.String() + " itself"
	if gateway, ok := netip.AddrFromSlice(route.Gw); ok && len(route.Gw) > 0 {
		hop = gateway.Unmap().String()
	}
	mtu := route.MTU
	if l := w.links[route.LinkIndex]; mtu == 0 && l != nil {
		mtu = l.Attrs().MTU
	}
	w.tell("route", "", "by %s, next hop %s, MTU %d", w.linkName(route.LinkIndex), hop, mtu)
}

// forwards returns whether the host forwards packets.
func (w *walker) forwards(to netip.Addr) bool {
	file := "/proc/sys/net/ipv4/ip_forward"
	if to.Is6() {
		file = "/proc/sys/net/ipv6/conf/all/forwarding"
	}
	text, err := os.ReadFile(file)
	return err != nil || strings.TrimSpace(string(text)) != "0"
}

// filtered judges a packet by the firewall, and ends the way if that drops it for certain.
func (w *walker) filtered(p packet, in, out int) (ended bool) {
	if p.protocol != maps.TCP || p.isReply || p.tcpFlags != tcpSYN {
		w.tell("firewall", "", "not judged: only the first packet of a TCP connection is")
		return false
	}
	if w.rules == nil {
		w.rules = firewall.Read(w.ctx)
	}
	verdict := w.rules.Judge(firewall.Packet{From: p.src.Addr(), To: p.dst.Addr(), In: w.linkName(in), Out: w.linkName(out)})
	switch verdict.Fate {
	case firewall.IsDropped:
		w.tell("firewall", verdict.By, "drops it")
		_ = w.end(Dropped, "the host's firewall drops it: %s", verdict.By)
		return true
	case firewall.MayBeDropped:
		w.tell("firewall", verdict.By, "drops it, unless a rule accepts it that trace does not understand")
	default:
		w.tell("firewall", "", "no rule drops it")
	}
	for _, what := range w.rules.Unread {
		w.tell("firewall", "", "not all rules could be read: %s", what)
	}
	return false
}

// output is the packet that the stack sends by a device.
func (w *walker) output(p packet, out, in int, tag uint32) error {
	_, isContainer := w.devices[out]
	_, isUplink := w.uplinks[out]
	switch {
	case isContainer:
		return w.toContainer(p, out, in, tag)
	case isUplink:
		return w.toUplink(p, out, in, tag)
	default:
		w.arrives(p, End{Address: p.dst.Addr()})
		w.outside = out
		return w.end(Sent, "by %s, where no program of ebpfnet is, as %s", w.linkName(out), p)
	}
}

// hostSends is a packet of the host's own.
func (w *walker) hostSends(p packet) error {
	w.at("stack", 0)
	w.on = "host"
	route, err := w.routeTo(p.dst.Addr())
	if err != nil {
		w.tell("route", "", "%v", err)
		return w.end(Dropped, "the host's stack drops it: %v", err)
	}
	if route.Type == unix.RTN_LOCAL || route.LinkIndex == loopback {
		w.tell("route", "", "%s is an address of the host", p.dst.Addr())
		p.build(make([]byte, 6), make([]byte, 6))
		return w.toLoopback(p)
	}
	out := w.outOf(route, p.dst.Addr())
	w.tellNextHop(route, p.dst.Addr())
	p.build(w.mac(out), w.neighborMAC(p.dst.Addr()))
	return w.output(p, out, 0, 0)
}
