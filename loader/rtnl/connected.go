package rtnl

import (
	"errors"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// ConnectedRoutes lists the routes of the main table that the kernel itself made for addresses with a subnet. Only
// LinkIndex, Dst and Src are set, and Src may be nil. family is AF_INET or AF_INET6; the network namespace is the
// calling thread's.
//
// The kernel selects them, so the cost does not grow with the routes to containers. The function Routes cannot do that:
// the library filters only after it has read everything.
func ConnectedRoutes(family uint8) ([]netlink.Route, error) {
	socket, err := openStrict()
	if err != nil {
		return nil, err
	}
	defer socket.Close()

	sockets := map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}
	messages, err := retry(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		request.Sockets = sockets
		request.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{
			Family:   family,
			Table:    unix.RT_TABLE_MAIN,
			Protocol: unix.RTPROT_KERNEL,
			Type:     unix.RTN_UNICAST,
		}})
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE)
	})
	if errors.Is(err, unix.ENOENT) { // the table comes with the first route
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var routes []netlink.Route
	for _, message := range messages {
		if route, ok := parseConnected(message, family); ok {
			routes = append(routes, route)
		}
	}
	return routes, nil
}

// parseConnected reads three attributes. It filters again, because some kernels ignore the request's filter for IPv6,
// and kernels without IPv6 answer with the routes of all families.
func parseConnected(message []byte, family uint8) (netlink.Route, bool) {
	header := nl.DeserializeRtMsg(message)
	if header.Family != family || header.Protocol != unix.RTPROT_KERNEL || header.Type != unix.RTN_UNICAST || header.Table != unix.RT_TABLE_MAIN {
		return netlink.Route{}, false
	}
	attrs, err := nl.ParseRouteAttr(message[header.Len():])
	if err != nil {
		return netlink.Route{}, false
	}
	route := netlink.Route{}
	for _, attr := range attrs {
		switch attr.Attr.Type {
		case unix.RTA_OIF:
			route.LinkIndex = int(nl.NativeEndian().Uint32(attr.Value))
		case unix.RTA_PREFSRC:
			route.Src = attr.Value
		case unix.RTA_DST:
			route.Dst = &net.IPNet{IP: attr.Value, Mask: net.CIDRMask(int(header.Dst_len), 8*len(attr.Value))}
		}
	}
	return route, route.Dst != nil
}

// openStrict opens a socket on which the kernel filters a list by the request's header.
func openStrict() (*nl.NetlinkSocket, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, explain(err)
	}
	if err := unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1); err != nil {
		socket.Close()
		return nil, explain(err)
	}
	return socket, nil
}
