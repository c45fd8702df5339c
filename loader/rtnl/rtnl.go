// Package rtnl opens routing netlink sockets and lists links, addresses, routes, qdiscs and filters.
//
// The kernel sends a list in parts, and marks it as interrupted if an object changes meanwhile, which is common on a
// host that creates containers. Every function here retries a bounded number of times. `make lint` forbids the list
// functions of the netlink library outside this package, because they return such a list as an error, or lose part of
// it.
//
// DeleteLinks deletes many devices in little more time than one. NodeRoutes lists and changes routes to other nodes.
// Watch reports changes. BeLiberal is for conntrack, by another family of netlink.
package rtnl

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Open opens a socket in the calling thread's network namespace. The socket is only for routing netlink, because a
// kernel may lack the other families, which the library opens by default. The caller must close the handle.
func Open() (*netlink.Handle, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	return handle, explain(err)
}

// OpenAt opens a socket for routing netlink in another network namespace. The caller must close the handle.
func OpenAt(ns netns.NsHandle) (*netlink.Handle, error) {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	return handle, explain(err)
}

func explain(err error) error {
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	return nil
}

// Links lists all devices.
func Links(handle *netlink.Handle) ([]netlink.Link, error) {
	return retry(handle.LinkList)
}

// Addresses lists the addresses of a device; family is one of the library's FAMILY constants.
func Addresses(handle *netlink.Handle, device netlink.Link, family int) ([]netlink.Addr, error) {
	return retry(func() ([]netlink.Addr, error) { return handle.AddrList(device, family) })
}

// Routes lists the routes that equal filter in the attributes of mask, a set of the library's RT_FILTER constants.
// These are routes of the main table, unless mask selects a table.
func Routes(handle *netlink.Handle, family int, filter *netlink.Route, mask uint64) ([]netlink.Route, error) {
	return retry(func() ([]netlink.Route, error) { return handle.RouteListFiltered(family, filter, mask) })
}

// Neighbors lists the neighbors of a device in an address family.
func Neighbors(handle *netlink.Handle, device, family int) ([]netlink.Neigh, error) {
	return retry(func() ([]netlink.Neigh, error) { return handle.NeighList(device, family) })
}

// Qdiscs lists the queueing disciplines of a device.
func Qdiscs(handle *netlink.Handle, device netlink.Link) ([]netlink.Qdisc, error) {
	return retry(func() ([]netlink.Qdisc, error) { return handle.QdiscList(device) })
}

// Filters lists the tc filters below a qdisc or class, in the order they run.
func Filters(handle *netlink.Handle, device netlink.Link, parent uint32) ([]netlink.Filter, error) {
	return retry(func() ([]netlink.Filter, error) { return handle.FilterList(device, parent) })
}

// retry returns the first list that no change interrupted. It gives up after more attempts than a host interrupts by
// accident; the error then wraps netlink.ErrDumpInterrupted.
func retry[T any](list func() ([]T, error)) ([]T, error) {
	const attempts = 10

	for range attempts {
		all, err := list()
		if err == nil {
			return all, nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("give up after %d attempts: %w", attempts, netlink.ErrDumpInterrupted)
}
