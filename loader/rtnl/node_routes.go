package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Protocol numbers mark our routes (`ip route show proto 235`).
const (
	NodeProtocol   = 235 // the node agent's
	PluginProtocol = 236 // the plugin's, all unreachable
)

// NodeRoute is a route of the main table to containers of another node: through a tunnel device that takes the outer
// addresses from the route (a lightweight tunnel), or to a neighbor. Or it is an unreachable route, which refuses packets
// to addresses that no container has. It is comparable.
//
// The netlink library does not support routes with a tunnel, and loses the tunnel when it lists them.
type NodeRoute struct {
	Prefix      netip.Prefix
	Metric      uint32     // the route with the smaller one is used; IPv6: 0 means 1024
	Device      int        // its index; 0 if unreachable
	Gateway     netip.Addr // of a route to a neighbor, else invalid
	Source      netip.Addr // source address of the host's own packets; invalid: the kernel chooses
	Tunnel      Tunnel     // of a route through a tunnel, else zero
	MTU         int        // 0: the device's
	Unreachable bool       // it leads nowhere: the sender gets an ICMP error
}

// Tunnel has the outer headers of a packet.
type Tunnel struct {
	ID            uint32 // VNI
	Local, Remote netip.Addr
	Checksum      bool // in the outer UDP header
}

// NodeRoutes are routes of one protocol number, which identifies their owner. All methods use one socket. The function
// Routes cannot list by protocol: the library filters only after it has read everything.
type NodeRoutes struct {
	protocol uint8
	sockets  map[int]*nl.SocketHandle
}

// OpenNodeRoutes opens the socket in the calling thread's network namespace. On it the kernel filters a list by the
// request's header.
func OpenNodeRoutes(protocol uint8) (*NodeRoutes, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, explain(err)
	}
	if err := unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		socket.Close()
		return nil, explain(err)
	}
	return &NodeRoutes{protocol, map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}}, nil
}

// Close closes the socket.
func (r *NodeRoutes) Close() { r.sockets[unix.NETLINK_ROUTE].Close() }

// List returns the routes of both families. The kernel selects them by their protocol, so the cost does not grow with
// the routes to containers.
func (r *NodeRoutes) List() ([]NodeRoute, error) {
	var routes []NodeRoute
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		messages, err := retry(func() ([][]byte, error) {
			request := r.request(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
			request.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{
				Family: family, Table: unix.RT_TABLE_MAIN, Protocol: r.protocol,
			}})
			return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
		})
		if errors.Is(err, unix.ENOENT) { // the table comes with the first route
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("list routes of protocol %d: %w", r.protocol, err)
		}
		for _, message := range messages {
			route, ok, err := r.parse(message, family)
			if err != nil {
				return nil, fmt.Errorf("list routes of protocol %d: %w", r.protocol, err)
			}
			if ok {
				routes = append(routes, route)
			}
		}
	}
	return routes, nil
}

// Add adds a route. It fails with EEXIST if a route to the prefix exists, whoever owns it.
func (r *NodeRoutes) Add(route NodeRoute) error {
	header, attrs := r.message(route)
	return r.change(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, header, attrs, "add", route)
}

// Replace replaces a route of ours in one step, so that a route exists at any time.
func (r *NodeRoutes) Replace(route NodeRoute) error {
	header, attrs := r.message(route)
	return r.change(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, header, attrs, "replace", route)
}

// Delete deletes a route. It succeeds if the route does not exist. The kernel finds it by prefix, metric, device and
// protocol, so it may have attributes that List does not return.
func (r *NodeRoutes) Delete(route NodeRoute) error {
	header, attrs := r.message(NodeRoute{Prefix: route.Prefix, Metric: route.Metric, Device: route.Device, Unreachable: route.Unreachable})
	header.Scope = unix.RT_SCOPE_NOWHERE // any
	err := r.change(unix.RTM_DELROUTE, 0, header, attrs, "delete", route)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

func (r *NodeRoutes) change(kind, flags int, header *nl.RtMsg, attrs []*nl.RtAttr, verb string, route NodeRoute) error {
	request := r.request(kind, flags|unix.NLM_F_ACK)
	request.AddData(header)
	for _, attr := range attrs {
		request.AddData(attr)
	}
	if _, err := request.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("%s route to %s: %w", verb, route.Prefix, err)
	}
	return nil
}

func (r *NodeRoutes) request(kind, flags int) *nl.NetlinkRequest {
	request := nl.NewNetlinkRequest(kind, flags)
	request.Sockets = r.sockets
	return request
}

// message returns the header and the attributes of a route (linux/rtnetlink.h).
func (r *NodeRoutes) message(route NodeRoute) (*nl.RtMsg, []*nl.RtAttr) {
	header := &nl.RtMsg{RtMsg: unix.RtMsg{
		Family:   uint8(nl.GetIPFamily(route.Prefix.Addr().AsSlice())),
		Dst_len:  uint8(route.Prefix.Bits()),
		Table:    unix.RT_TABLE_MAIN,
		Protocol: r.protocol,
		Scope:    unix.RT_SCOPE_UNIVERSE,
		Type:     unix.RTN_UNICAST,
	}}
	if !route.Gateway.IsValid() && route.Prefix.Addr().Is4() {
		header.Scope = unix.RT_SCOPE_LINK
	}
	attrs := []*nl.RtAttr{nl.NewRtAttr(unix.RTA_DST, route.Prefix.Addr().AsSlice())}
	if route.Unreachable {
		header.Type, header.Scope = unix.RTN_UNREACHABLE, unix.RT_SCOPE_UNIVERSE
	} else {
		attrs = append(attrs, nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(route.Device))))
	}
	if route.Metric != 0 {
		attrs = append(attrs, nl.NewRtAttr(unix.RTA_PRIORITY, nl.Uint32Attr(route.Metric)))
	}
	if route.Gateway.IsValid() {
		attrs = append(attrs, nl.NewRtAttr(unix.RTA_GATEWAY, route.Gateway.AsSlice()))
	}
	if route.Source.IsValid() {
		attrs = append(attrs, nl.NewRtAttr(unix.RTA_PREFSRC, route.Source.AsSlice()))
	}
	if route.MTU != 0 {
		metrics := nl.NewRtAttr(unix.RTA_METRICS, nil)
		metrics.AddRtAttr(unix.RTAX_LOCK, nl.Uint32Attr(lockMTU))
		metrics.AddRtAttr(unix.RTAX_MTU, nl.Uint32Attr(uint32(route.MTU)))
		attrs = append(attrs, metrics)
	}
	if route.Tunnel.Remote.IsValid() {
		attrs = append(attrs,
			nl.NewRtAttr(unix.RTA_ENCAP_TYPE, nl.Uint16Attr(uint16(encapType(route.Tunnel.Remote)))),
			route.Tunnel.attr())
	}
	return header, attrs
}

// Attributes of a tunnel (linux/lwtunnel.h). Those of IPv4 and of IPv6 have the same numbers.
const (
	tunnelID = iota + 1
	tunnelRemote
	tunnelLocal
	tunnelTTL
	tunnelTOS
	tunnelFlags

	flagChecksum = 1 // TUNNEL_CSUM
)

func encapType(remote netip.Addr) int {
	if remote.Is4() {
		return nl.LWTUNNEL_ENCAP_IP
	}
	return nl.LWTUNNEL_ENCAP_IP6
}

func (t Tunnel) attr() *nl.RtAttr {
	attr := nl.NewRtAttr(unix.RTA_ENCAP|unix.NLA_F_NESTED, nil)
	attr.AddRtAttr(tunnelID, binary.BigEndian.AppendUint64(nil, uint64(t.ID)))
	attr.AddRtAttr(tunnelRemote, t.Remote.AsSlice())
	if t.Local.IsValid() {
		attr.AddRtAttr(tunnelLocal, t.Local.AsSlice())
	}
	if t.Checksum {
		attr.AddRtAttr(tunnelFlags, binary.BigEndian.AppendUint16(nil, flagChecksum))
	}
	return attr
}

// parse reads a route. It filters again, because some kernels ignore the request's filter for IPv6, and kernels without
// IPv6 answer with the routes of all families.
func (r *NodeRoutes) parse(message []byte, family uint8) (route NodeRoute, ok bool, err error) {
	header := nl.DeserializeRtMsg(message)
	route.Unreachable = header.Type == unix.RTN_UNREACHABLE
	if header.Family != family || header.Protocol != r.protocol || header.Type != unix.RTN_UNICAST && !route.Unreachable ||
		header.Table != unix.RT_TABLE_MAIN || header.Flags&unix.RTM_F_CLONED != 0 {
		return NodeRoute{}, false, nil
	}
	attrs, err := nl.ParseRouteAttr(message[header.Len():])
	if err != nil {
		return NodeRoute{}, false, err
	}
	dst := netip.IPv4Unspecified()
	if header.Family == unix.AF_INET6 {
		dst = netip.IPv6Unspecified()
	}
	for _, attr := range attrs {
		switch attr.Attr.Type &^ unix.NLA_F_NESTED {
		case unix.RTA_DST:
			dst = addrOf(attr.Value)
		case unix.RTA_PRIORITY:
			route.Metric = nl.NativeEndian().Uint32(attr.Value)
		case unix.RTA_OIF:
			if !route.Unreachable { // IPv6: lo
				route.Device = int(nl.NativeEndian().Uint32(attr.Value))
			}
		case unix.RTA_GATEWAY:
			route.Gateway = addrOf(attr.Value)
		case unix.RTA_PREFSRC:
			route.Source = addrOf(attr.Value)
		case unix.RTA_METRICS:
			route.MTU, err = mtuOf(attr.Value)
		case unix.RTA_ENCAP:
			route.Tunnel, err = tunnelOf(attr.Value)
		}
		if err != nil {
			return NodeRoute{}, false, err
		}
	}
	route.Prefix = netip.PrefixFrom(dst, int(header.Dst_len))
	return route, true, nil
}

// lockMTU makes the kernel apply a route's MTU to forwarded IPv4 packets, too.
const lockMTU = 1 << unix.RTAX_MTU

// mtuOf returns a locked MTU. An MTU that is not locked is not ours.
func mtuOf(metrics []byte) (mtu int, err error) {
	attrs, err := nl.ParseRouteAttr(metrics)
	isLocked := false
	for _, attr := range attrs {
		switch attr.Attr.Type {
		case unix.RTAX_MTU:
			mtu = int(nl.NativeEndian().Uint32(attr.Value))
		case unix.RTAX_LOCK:
			isLocked = nl.NativeEndian().Uint32(attr.Value)&lockMTU != 0
		}
	}
	if !isLocked {
		mtu = 0
	}
	return mtu, err
}

func tunnelOf(encap []byte) (t Tunnel, err error) {
	attrs, err := nl.ParseRouteAttr(encap)
	for _, attr := range attrs {
		switch attr.Attr.Type {
		case tunnelID:
			t.ID = uint32(binary.BigEndian.Uint64(attr.Value))
		case tunnelRemote:
			t.Remote = addrOf(attr.Value)
		case tunnelLocal:
			if local := addrOf(attr.Value); !local.IsUnspecified() {
				t.Local = local
			}
		case tunnelFlags:
			t.Checksum = binary.BigEndian.Uint16(attr.Value)&flagChecksum != 0
		}
	}
	return t, err
}

func addrOf(value []byte) netip.Addr {
	addr, _ := netip.AddrFromSlice(value)
	return addr
}

// UnassignedPrefixes returns the prefixes for which the agent or the plugin has an unreachable route in the calling
// thread's network namespace: an address in one of them is unreachable, unless a container has it.
func UnassignedPrefixes() (prefixes []netip.Prefix, err error) {
	for _, protocol := range []uint8{NodeProtocol, PluginProtocol} {
		routes, err := routesOf(protocol)
		if err != nil {
			return nil, err
		}
		for _, route := range routes {
			if route.Unreachable {
				prefixes = append(prefixes, route.Prefix)
			}
		}
	}
	return prefixes, nil
}

// IsUnassigned reports whether such a route refuses packets to an address. The handle must be of the calling thread's
// network namespace.
func IsUnassigned(handle *netlink.Handle, addr netip.Addr) (bool, error) {
	if !addr.IsValid() {
		return false, nil
	}
	if _, err := handle.RouteGet(addr.AsSlice()); !errors.Is(err, unix.EHOSTUNREACH) {
		return false, nil
	}
	prefixes, err := UnassignedPrefixes()
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }), err
}

// RoutedByNodes returns the prefixes of the node agent's routes to other nodes in the calling thread's network namespace.
func RoutedByNodes() (routed map[netip.Prefix]bool, err error) {
	routes, err := routesOf(NodeProtocol)
	routed = map[netip.Prefix]bool{}
	for _, route := range routes {
		if !route.Unreachable {
			routed[route.Prefix] = true
		}
	}
	return routed, err
}

// ConnectedRoutes returns the routes of the main table that the kernel itself made for addresses with a subnet, in the
// calling thread's network namespace. Their Source may be invalid.
func ConnectedRoutes() ([]NodeRoute, error) {
	routes, err := routesOf(unix.RTPROT_KERNEL)
	return slices.DeleteFunc(routes, func(r NodeRoute) bool { return r.Unreachable || r.Prefix.Bits() == 0 }), err
}

// DeletePluginRoutes deletes routes of the plugin in the calling thread's network namespace.
func DeletePluginRoutes(which func(NodeRoute) bool) error {
	routes, err := OpenNodeRoutes(PluginProtocol)
	if err != nil {
		return err
	}
	defer routes.Close()
	list, err := routes.List()
	for _, route := range list {
		if which(route) {
			err = errors.Join(err, routes.Delete(route))
		}
	}
	return err
}

func routesOf(protocol uint8) ([]NodeRoute, error) {
	routes, err := OpenNodeRoutes(protocol)
	if err != nil {
		return nil, err
	}
	defer routes.Close()
	return routes.List()
}
