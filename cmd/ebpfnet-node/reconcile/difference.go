// Package reconcile makes this host have what package wanted says: it lists what is there, compares, and changes
// what differs. What is there is always listed anew, because others change it, too.
//
// It may import cmd/ebpfnet-node/wanted and loader/rtnl.
package reconcile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Present is what the host has of ours.
type Present struct {
	Device *Device // the tunnel, or another device that has its name; nil: none
	Tunnel Tunnel
	Routes []rtnl.NodeRoute
	Peers  []wanted.Peer // without names of nodes
}

// Tunnel is what the datapath knows of the tunnel; zero: none.
type Tunnel struct {
	Index int // of the device
	VNI   uint32
	Port  int

	Outer      [2]netip.Addr
	Containers [2]netip.Prefix
}

// Device is a tunnel device.
type Device struct {
	Index     int
	Name      string
	Kind      string
	Ours      bool // it has our alias
	External  bool // VXLAN that takes the outer addresses from routes and programs
	Up, NoARP bool
	Port      int
	MAC       string
	MTU       int
	Addresses []netip.Prefix
}

// Changes lead from what is present to what is wanted.
type Changes struct {
	DeleteDevice, CreateDevice bool
	SetDevice                  bool // alias, MAC, MTU, flags
	AddAddresses               []netip.Prefix
	DeleteAddresses            []netip.Prefix
	SetTunnel, SetPeers        bool             // in the datapath
	Add, Replace, Delete       []rtnl.NodeRoute // in a route to be added, device 0 is the tunnel
}

// IsEmpty returns whether nothing changes.
func (c *Changes) IsEmpty() bool { return c.Count() == 0 }

// Count returns the number of changes.
func (c *Changes) Count() int {
	n := len(c.AddAddresses) + len(c.DeleteAddresses) + len(c.Add) + len(c.Replace) + len(c.Delete)
	for _, change := range []bool{c.DeleteDevice, c.CreateDevice, c.SetDevice, c.SetTunnel, c.SetPeers} {
		if change {
			n++
		}
	}
	return n
}

// Difference compares. It fails where a device of somebody else has the tunnel's name.
func Difference(want *wanted.State, have *Present) (*Changes, error) {
	c := &Changes{}
	if err := c.compareDevice(want.Device, have.Device); err != nil {
		return nil, err
	}
	tunnel := 0
	if have.Device != nil && !c.DeleteDevice {
		tunnel = have.Device.Index
	}
	present := have.Routes
	if c.DeleteDevice { // they go with it
		present = slices.DeleteFunc(slices.Clone(present), func(r rtnl.NodeRoute) bool { return r.Device == have.Device.Index })
	}
	c.SetTunnel = c.CreateDevice || tunnelOf(want.Device, tunnel) != have.Tunnel
	c.compareRoutes(want.Routes, present, tunnel)
	c.SetPeers = !equalPeers(want.Peers, have.Peers)
	return c, nil
}

// tunnelOf returns what the datapath is to know.
func tunnelOf(want *wanted.Device, index int) Tunnel {
	if want == nil {
		return Tunnel{}
	}
	return Tunnel{index, want.VNI, want.Port, want.Outer, want.Containers}
}

func (c *Changes) compareDevice(want *wanted.Device, have *Device) error {
	if have != nil && !have.Ours && (want == nil || !have.isBegunAs(want)) {
		if want != nil && have.Name == want.Name {
			return fmt.Errorf("device %s (%s) is not ebpfnet's: delete it, or let --device name another one", have.Name, have.Kind)
		}
		have = nil
	}
	c.DeleteDevice = have != nil && (want == nil || !have.canBecome(want))
	c.CreateDevice = want != nil && (have == nil || c.DeleteDevice)
	if want == nil {
		return nil
	}
	if c.CreateDevice {
		c.AddAddresses = want.Addresses
		return nil
	}
	c.SetDevice = !have.Ours || have.MAC != want.MAC || have.MTU != want.MTU || !have.Up || !have.NoARP
	c.AddAddresses = without(want.Addresses, have.Addresses)
	c.DeleteAddresses = without(have.Addresses, want.Addresses)
	return nil
}

// canBecome returns whether a device differs only in what can be changed.
func (d *Device) canBecome(want *wanted.Device) bool {
	return d.Name == want.Name && d.External && d.Port == want.Port
}

// isBegunAs returns whether a device without our alias is ours all the same: an agent that was killed has added it.
func (d *Device) isBegunAs(want *wanted.Device) bool {
	return d.Name == want.Name && d.External && d.MAC == want.MAC
}

func without(all, some []netip.Prefix) (rest []netip.Prefix) {
	for _, prefix := range all {
		if !slices.Contains(some, prefix) {
			rest = append(rest, prefix)
		}
	}
	return rest
}

// routeKey is what the kernel tells two routes apart by.
type routeKey struct {
	prefix netip.Prefix
	metric int
}

func keyOf(r rtnl.NodeRoute) routeKey { return routeKey{r.Prefix, r.Metric} }

// compareRoutes takes the index of the tunnel device for the 0 in wanted routes.
func (c *Changes) compareRoutes(want, have []rtnl.NodeRoute, tunnel int) {
	missing := make(map[routeKey]rtnl.NodeRoute, len(want))
	for _, route := range want {
		if route.Device == 0 {
			route.Device = tunnel
		}
		missing[keyOf(route)] = route
	}
	for _, route := range have {
		wanted, found := missing[keyOf(route)]
		switch {
		case !found:
			c.Delete = append(c.Delete, route)
			continue
		case wanted != route:
			c.Replace = append(c.Replace, wanted)
		}
		delete(missing, keyOf(route))
	}
	for _, route := range want { // in their order
		if route, ok := missing[keyOf(route)]; ok {
			c.Add = append(c.Add, route)
		}
	}
}

func equalPeers(a, b []wanted.Peer) bool { return slices.Equal(normalized(a), normalized(b)) }

// normalized sorts peers, without names.
func normalized(peers []wanted.Peer) []wanted.Peer {
	peers = slices.Clone(peers)
	for i := range peers {
		peers[i].Node = ""
	}
	slices.SortFunc(peers, func(a, b wanted.Peer) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return peers
}
